// The cells of the timeline: the work of each slot in a range of steps.

import { hatching } from "./canvas.js";
import { formatCount } from "./format.js";
import { upperBound } from "./stats.js";
import { palette } from "./theme.js";

export class LiftCells {
  // `view` maps columns and slots to pixels.
  constructor(context, view, model, from, to) {
    this.colours = palette();
    Object.assign(this, { context, view, model });
    this.from = Math.max(model.firstCol, from);
    this.to = Math.min(model.nextCol, to);
    this.inset = view.rowHeight > 7 ? 1.5 : view.rowHeight > 3 ? 0.5 : 0;
    this.bubble = hatching(context, this.colours.bubble);
    this.rects = new Map(); // by style
    this.labels = [];
    this.drafts = []; // drawn over the other cells
  }

  draw() {
    for (const slot of this.model.slots.keys()) this.drawSlot(slot);
    this.fillRects();
    for (const draw of this.drafts) draw();
    this.fillRects();
    this.drawLabels();
    this.drawGrid();
    for (const slot of this.model.slots.keys()) this.drawMarks(slot);
    this.fillRects();
  }

  staysIn(slot) {
    const stays = this.model.slots[slot];
    const found = [];
    for (let index = upperBound(stays, this.to, (stay) => stay.from) - 1; index >= 0; index--) {
      if (stays[index].to <= this.from) break;
      found.push(stays[index]);
    }
    return found;
  }

  drawSlot(slot) {
    const { view, inset } = this;
    const y = view.yOf(slot) + inset;
    const height = Math.max(1, view.rowHeight - 2 * inset);
    for (const stay of this.staysIn(slot)) {
      this.rect(this.colours.stay, stay.from, stay.to, y, height);
      if (stay.idleFrom < stay.to) this.rect(this.bubble, stay.idleFrom, stay.to, y, height);
      this.drawParts(stay, y, height);
    }
  }

  // Collect rectangles and fill them by colour: changing the colour costs more than filling.
  rect(style, from, to, y, height) {
    const x = this.view.xOf(Math.max(from, this.from));
    const width = this.view.xOf(Math.min(to, this.model.nextCol)) - x;
    if (width <= 0) return;
    let rects = this.rects.get(style);
    if (!rects) this.rects.set(style, (rects = []));
    rects.push(x, y, Math.max(width, 0.6), height);
  }

  fillRects() {
    const { context } = this;
    for (const [style, rects] of this.rects) {
      context.fillStyle = style;
      for (let at = 0; at < rects.length; at += 4) context.fillRect(rects[at], rects[at + 1], rects[at + 2], rects[at + 3]);
    }
    this.rects.clear();
  }

  drawParts(stay, y, height) {
    const { parts } = stay.request;
    const until = Math.min(stay.to, this.to);
    for (let index = Math.max(0, upperBound(parts, Math.max(stay.from, this.from), (part) => part.col) - 1);
      index < parts.length && parts[index].col < until; index++) {
      const part = parts[index];
      const [from, to] = [Math.max(part.col, stay.from), Math.min(part.col + part.n, stay.to)];
      if (part.kind === "prefill") this.drawChunk(part, from, to, y, height);
      else this.drawDecode(part, from, to, y, height);
    }
  }

  drawChunk(part, from, to, y, height) {
    const { view } = this;
    this.rect(this.colours.prefill, from, to, y, height);
    if (view.colWidth >= 24 && view.rowHeight >= 14) this.labels.push([formatCount(part.count), view.xOf(from + 0.5), y + height / 2 + 0.5]);
  }

  drawLabels() {
    const { context } = this;
    context.fillStyle = "#fff";
    context.textAlign = "center";
    for (const [text, x, y] of this.labels) context.fillText(text, x, y);
  }

  // Draft tokens fill the cell from below: accepted ones in colour, rejected ones as an empty frame.
  drawDecode(part, from, to, y, height) {
    this.rect(this.colours.decode, from, to, y, height);
    if (!part.proposed) return;
    const accepted = (height * part.accepted) / (part.proposed + 1);
    const rejected = (height * (part.proposed - part.accepted)) / (part.proposed + 1);
    this.drafts.push(() => {
      this.rect(this.colours.draft, from, to, y + height - accepted, accepted);
      this.rect(this.colours.preempt, from, to, y, rejected);
      if (this.view.colWidth <= 4 || rejected < 3) return;
      this.rect(this.colours.card, from + 1.5 / this.view.colWidth, to - 1.5 / this.view.colWidth, y + 1, rejected - 2);
    });
  }

  // Thin gaps between columns divide a bar into steps.
  drawGrid() {
    const { context, view } = this;
    if (view.colWidth < 4) return;
    context.fillStyle = this.colours.card;
    for (let col = this.from; col <= this.to; col++) context.fillRect(view.xOf(col) - 0.5, 0, 1, view.axisTop);
  }

  // Admissions (with cached tokens), preemptions and endings.
  drawMarks(slot) {
    const { view, inset } = this;
    const y = view.yOf(slot) + inset;
    const height = Math.max(1, view.rowHeight - 2 * inset);
    for (const stay of this.staysIn(slot)) {
      const { request } = stay;
      const admission = request.admissions.find((each) => each.col === stay.from);
      if (admission && admission.cached + admission.swapped > 0) {
        const share = Math.min(1, (admission.cached + admission.swapped) / Math.max(1, request.prompt));
        const width = Math.max(1.5, Math.min(view.colWidth * 0.45, 8)) / view.colWidth;
        const colour = admission.swapped ? this.colours.swap : this.colours.cached;
        this.rect(colour, stay.from, stay.from + width, y + height * (1 - share), height * share);
      }
      if (stay.to <= this.model.nextCol) this.drawLeaving(stay, y, height);
    }
  }

  drawLeaving(stay, y, height) {
    const { context, view } = this;
    const { request } = stay;
    const isEnd = request.end && stay.to >= request.end.col + 1 && !request.preempts.some((each) => each.col === stay.to);
    const col = isEnd ? Math.min(request.end.col + 1, stay.to) : stay.to;
    const width = Math.max(1, Math.min(2.5, view.colWidth / 3));
    const isGood = isEnd && (request.end.reason === "stop" || request.end.reason === "length");
    this.rect(isGood ? this.colours.text : this.colours.preempt, col - width / view.colWidth, col, y, height);
    if (isEnd || view.colWidth < 3 || height < 5) return;
    const x = view.xOf(col) - width;
    context.fillStyle = this.colours.preempt;
    context.beginPath(); // preempted: an arrow back to the queue
    context.moveTo(x, y);
    context.lineTo(x - Math.min(6, view.colWidth), y + height / 2);
    context.lineTo(x, y + height);
    context.fill();
  }
}
