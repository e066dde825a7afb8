// The timeline's drawing: one row per seat, one column per step.

import { SMALL_FONT, hatching } from "./canvas.js";
import { formatCount } from "./format.js";
import { upperBound } from "./stats.js";
import { palette } from "./theme.js";

export class LiftDrawing {
  constructor(context, view, model, marks) {
    Object.assign(this, { context, view, model, marks }); // marks: hovered request, selected request, cursor column
    this.colours = palette();
    this.from = Math.max(model.firstCol, Math.floor(view.left));
    this.to = Math.min(model.nextCol, Math.ceil(view.right) + 1);
    this.inset = view.rowHeight > 7 ? 1.5 : view.rowHeight > 3 ? 0.5 : 0;
    this.bubble = hatching(context, this.colours.bubble);
  }

  draw() {
    const { context, view } = this;
    this.drawRows();
    context.save();
    context.beginPath();
    context.rect(view.gutter, 0, view.width - view.gutter, view.axisTop);
    context.clip();
    for (let seat = 0; seat < this.model.seats.length; seat++) this.drawSeat(seat);
    this.drawGrid();
    for (let seat = 0; seat < this.model.seats.length; seat++) this.drawMarks(seat);
    this.drawBreaks();
    this.drawCursor();
    context.restore();
    this.drawAxis();
  }

  drawRows() {
    const { context, view } = this;
    context.font = SMALL_FONT;
    context.textBaseline = "middle";
    context.textAlign = "right";
    const every = view.rowHeight >= 13 ? 1 : Math.ceil(13 / view.rowHeight / 4) * 4;
    for (let seat = 0; seat < view.rows; seat++) {
      const y = view.yOf(seat);
      if (seat % 2 === 0) {
        context.fillStyle = this.colours.faint;
        context.fillRect(view.gutter, y, view.width - view.gutter, view.rowHeight);
      }
      if (seat % every === 0) {
        context.fillStyle = this.colours.muted;
        context.fillText(String(seat + 1), view.gutter - 8, y + Math.max(view.rowHeight / 2, 6));
      }
    }
  }

  staysIn(seat) {
    const stays = this.model.seats[seat];
    const found = [];
    for (let index = upperBound(stays, this.to, (stay) => stay.from) - 1; index >= 0; index--) {
      if (stays[index].to <= this.from) break;
      found.push(stays[index]);
    }
    return found;
  }

  drawSeat(seat) {
    const { context, view, inset } = this;
    const y = view.yOf(seat) + inset;
    const height = Math.max(1, view.rowHeight - 2 * inset);
    for (const stay of this.staysIn(seat)) {
      const [from, to] = this.clipped(stay.from, stay.to);
      const isMarked = stay.request === this.marks.hovered || stay.request === this.marks.selected;
      context.fillStyle = isMarked ? this.colours.hover : this.colours.stay;
      this.rect(from, to, y, height);
      if (stay.idleFrom < stay.to) {
        context.fillStyle = this.bubble;
        this.rect(...this.clipped(stay.idleFrom, stay.to), y, height);
      }
      this.drawParts(stay, y, height);
    }
  }

  clipped(from, to) {
    return [Math.max(from, this.from), Math.min(to, this.model.nextCol)];
  }

  rect(from, to, y, height) {
    if (to <= from) return;
    const x = this.view.xOf(from);
    this.context.fillRect(x, y, Math.max(this.view.xOf(to) - x, 0.6), height);
  }

  drawParts(stay, y, height) {
    const { parts } = stay.request;
    const until = Math.min(stay.to, this.to);
    for (let index = Math.max(0, upperBound(parts, Math.max(stay.from, this.from), (part) => part.col) - 1);
      index < parts.length && parts[index].col < until; index++) {
      const part = parts[index];
      const [from, to] = this.clipped(Math.max(part.col, stay.from), Math.min(part.col + part.n, stay.to));
      if (to <= from) continue;
      if (part.kind === "prefill") this.drawChunk(part, from, to, y, height);
      else this.drawDecode(part, from, to, y, height);
    }
  }

  drawChunk(part, from, to, y, height) {
    const { context, view } = this;
    const step = this.model.stepAt(part.col);
    context.globalAlpha = 0.5 + 0.5 * Math.min(1, part.count / Math.max(1, step ? step.prefillLimit : part.count));
    context.fillStyle = this.colours.prefill;
    this.rect(from, to, y, height);
    context.globalAlpha = 1;
    if (view.colWidth >= 24 && view.rowHeight >= 14) {
      context.fillStyle = "#fff";
      context.textAlign = "center";
      context.fillText(formatCount(part.count), view.xOf(from + 0.5), y + height / 2 + 0.5);
    }
  }

  // Drafted tokens fill the cell from below: those accepted in one colour, the rejected as an empty frame.
  drawDecode(part, from, to, y, height) {
    const { context, view } = this;
    context.fillStyle = this.colours.decode;
    this.rect(from, to, y, height);
    if (!part.proposed) return;
    const accepted = (height * part.accepted) / (part.proposed + 1);
    const rejected = (height * (part.proposed - part.accepted)) / (part.proposed + 1);
    context.fillStyle = this.colours.draft;
    this.rect(from, to, y + height - accepted, accepted);
    context.fillStyle = this.colours.card;
    this.rect(from, to, y, rejected);
    if (view.colWidth > 3 && rejected > 1) {
      context.strokeStyle = this.colours.preempt;
      context.strokeRect(view.xOf(from) + 0.5, y + 0.5, view.colWidth - 1, rejected - 1);
    }
  }

  // Thin gaps between the columns turn a bar into steps.
  drawGrid() {
    const { context, view } = this;
    if (view.colWidth < 4) return;
    context.fillStyle = this.colours.card;
    for (let col = this.from; col <= this.to; col++) context.fillRect(view.xOf(col) - 0.5, 0, 1, view.axisTop);
  }

  // Where a request boards (with what was cached), gives way, and ends.
  drawMarks(seat) {
    const { context, view, inset } = this;
    const y = view.yOf(seat) + inset;
    const height = Math.max(1, view.rowHeight - 2 * inset);
    for (const stay of this.staysIn(seat)) {
      const { request } = stay;
      const board = request.boards.find((each) => each.col === stay.from);
      if (board && board.cached + board.swapped > 0) {
        const share = Math.min(1, (board.cached + board.swapped) / Math.max(1, request.prompt));
        const width = Math.max(1.5, Math.min(view.colWidth * 0.45, 8));
        context.fillStyle = board.swapped ? this.colours.swap : this.colours.cached;
        context.fillRect(view.xOf(stay.from), y + height * (1 - share), width, height * share);
      }
      if (stay.to <= this.model.nextCol) this.drawLeaving(stay, y, height);
    }
  }

  drawLeaving(stay, y, height) {
    const { context, view } = this;
    const { request } = stay;
    const isEnd = request.end && stay.to >= request.end.col + 1 && !request.preempts.some((each) => each.col === stay.to);
    const x = view.xOf(isEnd ? Math.min(request.end.col + 1, stay.to) : stay.to);
    const width = Math.max(1, Math.min(2.5, view.colWidth / 3));
    const isGood = isEnd && (request.end.reason === "stop" || request.end.reason === "length");
    context.fillStyle = isGood ? this.colours.text : this.colours.preempt;
    context.fillRect(x - width, y, width, height);
    if (isEnd || view.colWidth < 3 || height < 5) return;
    context.beginPath(); // thrown out: an arrow pointing back to the queue
    context.moveTo(x - width, y);
    context.lineTo(x - width - Math.min(6, view.colWidth), y + height / 2);
    context.lineTo(x - width, y + height);
    context.fill();
  }

  drawBreaks() {
    const { context, view } = this;
    context.fillStyle = this.colours.muted;
    for (const col of this.model.breaks) context.fillRect(view.xOf(col) - 1, 0, 2, view.axisTop);
    context.textAlign = "left";
    context.setLineDash([4, 3]);
    for (const { col, policy } of this.model.policyChanges) {
      const x = view.xOf(col);
      if (x < view.gutter || x > view.width) continue;
      context.strokeStyle = this.colours.accent;
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, view.axisTop);
      context.stroke();
      const width = context.measureText(policy).width + 10;
      context.fillStyle = this.colours.accent;
      context.fillRect(x, 0, width, 16);
      context.fillStyle = "#fff";
      context.fillText(policy, x + 5, 8.5);
    }
    context.setLineDash([]);
  }

  drawCursor() {
    const { context, view, marks } = this;
    if (marks.cursor === null) return;
    context.strokeStyle = this.colours.text;
    context.lineWidth = 1;
    const width = Math.max(view.colWidth, 2);
    context.strokeRect(Math.round(view.xOf(marks.cursor)) - 0.5, 0.5, width, view.axisTop - 1);
  }

  drawAxis() {
    const { context, view, model } = this;
    context.fillStyle = this.colours.muted;
    context.textAlign = "center";
    context.textBaseline = "middle";
    const every = niceStep(90 / view.colWidth);
    const newest = model.steps.at(-1);
    for (let col = Math.ceil(this.from / every) * every; col < this.to; col += every) {
      const step = model.stepAt(col);
      const x = view.xOf(col + 0.5);
      if (!step || x < view.gutter + 20 || x > view.width - 24) continue;
      context.fillRect(Math.round(x), view.axisTop, 1, 4);
      const ago = newest.time - step.time;
      context.fillText(ago < 0.001 ? `step ${step.step}` : `−${ago >= 10 ? ago.toFixed(0) : ago.toFixed(ago >= 1 ? 1 : 2)} s`, x, view.axisTop + 12);
    }
  }
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, least)));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least) || power * 10;
}
