// The state that the frames describe: requests, slots, steps and blocks. Draws nothing.

import { Blocks } from "./blocks.js";
import { LiftRequest } from "./request.js";
import { Reservoir, upperBound } from "./stats.js";

const KEPT_STEPS = 20000;

// The engine remembers the last 1,000 tenants and repeats their names only with a keyframe, in any order.
// Twice that number is kept here, so that no name is forgotten which the engine will not repeat.
const KEPT_TENANTS = 2000;

const STEP_FIELDS = ["step", "time", "seconds", "predicted", "decode", "prefill", "padding", "idle", "waiting",
  "usedBlocks", "limit", "prefillLimit", "parts"];

export class Model {
  constructor() {
    this.hello = {};
    this.service = null; // totals of the server
    this.lost = 0; // frames lost because this page read too slowly
    this.key = null; // the last keyframe: slots and sizes
    this.policy = "";
    this.now = 0;
    this.mayHaveMissed = false; // whether steps may be missing since the last one
    this.isSameClock = false; // whether the last two keyframes are of the same engine
    this.requests = new Map(); // by id
    this.handles = new Map();
    this.tenants = new Map(); // names by number; the most recent one comes last
    this.steps = []; // the last KEPT_STEPS; a step's column never changes, but its index here does
    this.firstCol = 0;
    this.slots = []; // a list of stays {request, from, to, idleFrom} for each slot
    this.occupants = [];
    this.breaks = []; // columns before which frames are missing
    this.policyChanges = []; // {col, policy}
    this.waiting = [];
    this.reasons = {};
    this.blocks = new Blocks();
    this.times = { ttft: new Reservoir(), itl: new Reservoir(), e2e: new Reservoir() };
    this.finished = {}; // counts by reason, since the page was opened
    this.lookups = {};
    this.tokens = { prompt: 0, cached: 0, output: 0, proposed: 0, accepted: 0 };
    this.version = 0; // number of frames applied
  }

  get nextCol() {
    return this.firstCol + this.steps.length;
  }

  get slotsTaken() {
    return this.occupants.filter(Boolean).length;
  }

  stepAt(col) {
    return this.steps[col - this.firstCol] || null;
  }

  // The columns, from `left` to `right`, before which the engine had no step for a second or more, and that time.
  idleTimes(left, right) {
    const found = [];
    for (let col = Math.max(this.firstCol + 1, Math.floor(left)); col < Math.min(this.nextCol, right + 1); col++) {
      const step = this.stepAt(col);
      const seconds = step.time - step.seconds - this.stepAt(col - 1).time;
      if (seconds >= 1 && !this.breaks.includes(col)) found.push([col, seconds]);
    }
    return found;
  }

  // The parts that a step computed, by slot.
  workAt(col) {
    const found = [];
    for (const stays of this.slots) {
      const stay = stays[upperBound(stays, col, (each) => each.from) - 1];
      const part = stay && col < stay.to ? stay.request.partAt(col) : null;
      if (part) found.push({ request: stay.request, part, start: part.start + col - part.col, count: part.count });
    }
    return found;
  }

  apply(frame) {
    this.version++;
    const kinds = {
      hello: () => {
        this.hello = frame;
        this.mayHaveMissed = true;
      },
      service: () => (this.service = frame),
      lost: () => {
        this.mayHaveMissed ||= frame.frames > this.lost;
        this.lost = frame.frames;
      },
      tenants: () => Object.entries(frame.names).forEach(([number, name]) => this.rememberTenant(Number(number), name)),
      key: () => this.applyKey(frame),
      batch: () => this.applyBatch(frame),
    };
    if (kinds[frame.t]) kinds[frame.t](); // ignore kinds of a newer server
  }

  tenantName(request) {
    return request.tenantName || "–";
  }

  rememberTenant(number, name) {
    this.tenants.delete(number);
    this.tenants.set(number, name);
  }

  // After the requests of the frame have their names: it may have more tenants than are kept.
  forgetTenants() {
    for (const number of this.tenants.keys()) {
      if (this.tenants.size <= KEPT_TENANTS) return;
      this.tenants.delete(number);
    }
  }

  // ---- keyframes: the complete state ------------------------------------------------------------------------------

  // After a reconnect the stream begins before the point where it stopped: skip the known steps.
  isKnown(frame) {
    const clock = (key) => key.wall - key.now;
    if (frame.t === "key") this.isSameClock = this.key !== null && Math.abs(clock(frame) - clock(this.key)) < 1;
    return this.isSameClock && frame.now <= this.now;
  }

  applyKey(frame) {
    if (this.isKnown(frame)) return;
    const open = new Set(frame.requests.map((given) => given[1]));
    frame.slots ??= frame.seats; // Earlier recordings call them so.
    this.key = frame;
    this.now = frame.now;
    this.handles.clear();
    for (const request of this.requests.values()) {
      if (request.state !== "done" && !open.has(request.id)) this.leave(request, this.nextCol, "done");
    }
    this.blocks.reset(frame);
    for (const given of frame.requests) this.restoreRequest(given);
    this.applyStanding(frame);
    this.forgetTenants();
  }

  restoreRequest(given) {
    const [, id, , , , , , state, computed, outputs, table, serviceClass] = given;
    let request = this.requests.get(id);
    if (!request) {
      request = this.addRequest(given, serviceClass);
      request.isKnownWhole = state === "waiting" && computed === 0;
    }
    request.handle = given[0];
    request.outputs = outputs;
    this.handles.set(request.handle, request);
    this.blocks.setTable(request, 0, table);
    if (state === "waiting") this.leave(request, this.nextCol, "waiting");
    else if (request.slot < 0) this.occupySlot(request, this.nextCol);
    if (state === "idle") this.becomeIdle(request, this.nextCol);
  }

  // Keep the tenant's name, because the number may be forgotten, or reused by a restarted engine.
  addRequest(given, serviceClass) {
    const request = new LiftRequest(given, serviceClass);
    const name = this.tenants.get(request.tenant);
    if (name !== undefined) this.rememberTenant(request.tenant, name);
    request.tenantName = name;
    this.requests.set(request.id, request);
    return request;
  }

  // ---- batches: changes since the last frame -----------------------------------------------------------------------

  applyBatch(frame) {
    if (this.isKnown(frame)) return;
    const steps = frame.steps || [];
    const base = this.nextCol;
    for (const given of frame.new || []) {
      const request = this.addRequest(given, given[7]);
      this.handles.set(request.handle, request);
      this.tokens.prompt += request.prompt;
    }
    const moves = movesOf(frame);
    for (let index = 0; index <= steps.length; index++) {
      const step = steps[index] && this.addStep(steps[index]);
      const here = moves.filter((move) => move.index === index);
      if (step && step.idle === 0) this.freeIdleSlots(base + index);
      for (const move of here.filter((move) => !step || move.time < step.time)) this.move(move, base + index);
      for (const move of here.filter((move) => step && move.time >= step.time)) this.move(move, base + index + 1);
    }
    this.applyWork(frame, base);
    for (const [handle, start, blocks] of frame.tables || []) this.blocks.setTable(this.handles.get(handle), start, blocks);
    if (frame.blocks) this.blocks.change(frame.blocks, frame.now);
    this.now = frame.now;
    this.applyStanding(frame);
    this.forgetTenants();
    this.trim();
  }

  addStep(given) {
    const step = Object.fromEntries(STEP_FIELDS.map((name, index) => [name, given[index]]));
    step.outputs = 0;
    const last = this.steps.at(-1);
    if (this.mayHaveMissed && last && step.step !== last.step + 1) this.breaks.push(this.nextCol);
    this.mayHaveMissed = false;
    this.steps.push(step);
    return step;
  }

  // `col` is the first column after the event.
  move({ kind, handle, time, more }, col) {
    const request = this.handles.get(handle);
    if (!request) return;
    if (kind === "board") {
      const [cached, miss, swapped] = more;
      if (!request.admissions.length) {
        this.tokens.cached += cached;
        this.lookups[miss || "all_found"] = (this.lookups[miss || "all_found"] || 0) + 1;
      }
      request.admissions.push({ time, col, cached, miss, swapped });
      request.stopWaiting(time);
      this.occupySlot(request, col);
    } else if (kind === "preempt") {
      request.preempts.push({ time, col, computed: more[0], swapped: Boolean(more[1]) });
      this.blocks.setTable(request, 0, []);
      this.leave(request, col, "waiting");
    } else {
      request.end = { time, col: col - 1, reason: more[0] };
      request.outputsAtEnd = more[1];
      request.stopWaiting(time);
      this.finished[more[0]] = (this.finished[more[0]] || 0) + 1;
      if (more[2] && request.state === "running") this.becomeIdle(request, col);
      else this.leave(request, col, "done");
    }
    const isOver = !this.occupants.some((occupant) => occupant && occupant.state === "running");
    if (isOver) this.freeIdleSlots(col); // the last request of a batch frees all its slots
  }

  // Prefill chunks and runs of decodes, in the order in which each request computed them.
  applyWork(frame, base) {
    const pieces = (frame.chunks || []).map(([handle, index, start, count, proposed, accepted]) =>
      ({ handle, index, n: 1, start, count, proposed, accepted, kind: "prefill" }));
    for (const [handle, index, n, start] of frame.runs || []) pieces.push({ handle, index, n, start, count: 1, kind: "decode" });
    pieces.sort((a, b) => a.index - b.index);
    for (const piece of pieces) {
      const request = this.handles.get(piece.handle);
      if (request) this.work(request, piece, base + piece.index);
    }
    for (const [handle] of frame.end || []) this.conclude(this.handles.get(handle));
  }

  work(request, piece, col) {
    // A pipelined engine may have started a step before the end of a request was detected.
    const n = request.end ? Math.min(piece.n, request.end.col + 1 - col) : piece.n;
    if (n <= 0) return;
    if (piece.proposed !== undefined) {
      piece.kind = piece.start >= request.prompt ? "decode" : "prefill";
      this.tokens.proposed += piece.proposed;
      this.tokens.accepted += piece.accepted;
    }
    request.addPart({ kind: piece.kind, col, n, start: piece.start, count: piece.count, proposed: piece.proposed, accepted: piece.accepted });
    for (let offset = 0; offset < n; offset++) {
      const step = this.stepAt(col + offset);
      const start = piece.start + offset;
      const gained = piece.proposed !== undefined ? piece.accepted + 1 : Number(start + piece.count >= request.known);
      if (gained) this.produce(request, step, gained);
    }
  }

  produce(request, step, count) {
    request.outputs += count;
    step.outputs += count;
    this.tokens.output += count;
    if (request.firstToken === null && request.isKnownWhole) {
      request.firstToken = step.time;
      this.times.ttft.add(step.time - request.arrival);
    } else if (request.lastToken !== null) {
      this.times.itl.add((step.time - request.lastToken) / count);
    }
    request.lastToken = step.time;
  }

  conclude(request) {
    if (!request) return;
    request.outputs = request.outputsAtEnd;
    if (request.end.reason === "stop" || request.end.reason === "length") this.times.e2e.add(request.end.time - request.arrival);
  }

  applyStanding(frame) {
    if (frame.policy) {
      if (this.policy && this.policy !== frame.policy) this.policyChanges.push({ col: this.nextCol, policy: frame.policy });
      this.policy = frame.policy;
    }
    this.reasons = frame.reasons;
    this.blocks.evictions = frame.evictions;
    this.states = frame.states;
    this.waiting = frame.waiting.map(([handle, reason]) => {
      const request = this.handles.get(handle);
      if (request) request.waitsFor(reason, frame.now);
      return request && { request, reason };
    }).filter(Boolean);
  }

  // ---- slots ------------------------------------------------------------------------------------------------------

  occupySlot(request, col) {
    let slot = this.occupants.findIndex((occupant) => !occupant);
    if (slot < 0) slot = this.occupants.length;
    this.occupants[slot] = request;
    this.slots[slot] ||= [];
    this.slots[slot].push({ request, from: col, to: Infinity, idleFrom: Infinity });
    request.slot = slot;
    request.state = "running";
  }

  becomeIdle(request, col) {
    request.state = "idle";
    if (request.slot >= 0) this.slots[request.slot].at(-1).idleFrom = col;
  }

  freeIdleSlots(col) {
    for (const request of this.occupants) if (request && request.state === "idle") this.leave(request, col, "done");
  }

  leave(request, col, state) {
    if (request.slot >= 0) {
      this.slots[request.slot].at(-1).to = col;
      this.occupants[request.slot] = null;
      request.slot = -1;
    }
    request.state = state;
  }

  // ---- pruning ----------------------------------------------------------------------------------------------------

  trim() {
    if (this.steps.length < KEPT_STEPS * 1.1) return;
    const dropped = this.steps.length - KEPT_STEPS;
    this.steps.splice(0, dropped);
    this.firstCol += dropped;
    for (let slot = 0; slot < this.slots.length; slot++) {
      this.slots[slot] = this.slots[slot].filter((stay) => stay.to > this.firstCol);
    }
    for (const [id, request] of this.requests) {
      if (request.state === "done" && (!request.end || request.end.col < this.firstCol)) {
        this.requests.delete(id);
        if (this.handles.get(request.handle) === request) this.handles.delete(request.handle);
      }
    }
  }
}

// Admissions, preemptions and endings in the order in which they happened.
function movesOf(frame) {
  const moves = [];
  for (const kind of ["end", "preempt", "board"]) { // at the same time, slots are freed before they are taken
    for (const [handle, index, time, ...more] of frame[kind] || []) moves.push({ kind, handle, index, time, more });
  }
  return moves.sort((a, b) => a.index - b.index || a.time - b.time);
}
