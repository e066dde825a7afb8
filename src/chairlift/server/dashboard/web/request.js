// The page's state of one request.

import { upperBound } from "./stats.js";

export class LiftRequest {
  constructor([handle, id, arrival, prompt, maxNew, tenant, priority], serviceClass) {
    Object.assign(this, { handle, id, arrival, prompt, maxNew, tenant, priority, serviceClass });
    this.state = "waiting"; // waiting, running, idle (finished, in a batch that is not) or done
    this.slot = -1;
    this.admissions = []; // {time, col, cached, miss, swapped}
    this.preempts = []; // {time, col, computed, swapped}
    this.waits = []; // {reason, from, to}
    this.parts = []; // computed parts in order: {kind, col, n, start, count, proposed, accepted}
    this.outputs = 0;
    this.firstToken = null; // its time
    this.lastToken = null;
    this.end = null; // {time, col, reason}
    this.table = [];
    this.isKnownWhole = true; // false if it began before the page was opened
  }

  get known() {
    return this.prompt + this.outputs;
  }

  get cached() {
    return this.admissions.length ? this.admissions[0].cached : 0;
  }

  get proposed() {
    return this.parts.reduce((sum, part) => sum + (part.proposed || 0), 0);
  }

  get accepted() {
    return this.parts.reduce((sum, part) => sum + (part.accepted || 0), 0);
  }

  addPart(part) {
    const last = this.parts[this.parts.length - 1];
    const goesOn = last && last.kind === "decode" && part.kind === "decode" && !part.proposed && !last.proposed;
    if (goesOn && last.col + last.n === part.col) last.n += part.n;
    else this.parts.push(part);
  }

  // The part that covers a column, if any.
  partAt(col) {
    const part = this.parts[upperBound(this.parts, col, (each) => each.col) - 1];
    return part && col < part.col + part.n ? part : null;
  }

  waitsFor(reason, now) {
    const last = this.waits[this.waits.length - 1];
    if (last && last.to === null && last.reason === reason) return;
    this.stopWaiting(now);
    this.waits.push({ reason, from: this.waits.length ? now : this.arrival, to: null });
  }

  stopWaiting(now) {
    const last = this.waits[this.waits.length - 1];
    if (last && last.to === null) last.to = now;
  }
}
