// Draws the timeline: one row per slot, one column per step, with axes and labels.

import { Layer, SMALL_FONT } from "./canvas.js";
import { formatSeconds } from "./format.js";
import { LiftCells } from "./lift_cells.js";
import { palette } from "./theme.js";

const backdrop = new Layer();
const TILED_BELOW = 2.5; // pixels per column; narrower columns are too many to draw every time
const LABEL_ROOM = 56; // pixels between the middles of labels

export class LiftDrawing {
  constructor(context, view, model, tiles, marks) {
    Object.assign(this, { context, view, model, tiles, marks }); // marks: hovered, selected, cursor, own
    this.colours = palette();
    this.pauses = model.idleTimes(view.left, view.right).map(([col, seconds]) => ({ x: view.xOf(col), seconds }));
  }

  draw() {
    const { context, view, model } = this;
    backdrop.fill(view.width, view.height, view.rows, (pen) => this.drawRows(pen)).put(context, 0, 0);
    context.font = SMALL_FONT;
    context.textBaseline = "middle";
    context.save();
    context.beginPath();
    context.rect(view.gutter, 0, view.width - view.gutter, view.axisTop);
    context.clip();
    if (view.colWidth < TILED_BELOW) this.tiles.draw(context, view, model);
    else new LiftCells(context, view, model, Math.floor(view.left), Math.ceil(view.right) + 1).draw();
    this.drawOwn();
    for (const request of new Set([this.marks.hovered, this.marks.selected])) if (request) this.drawOutline(request);
    this.drawBreaks();
    this.drawCursor();
    context.restore();
    this.drawAxis();
  }

  // Slots and their numbers.
  drawRows(context) {
    const { view } = this;
    context.font = SMALL_FONT;
    context.textBaseline = "middle";
    context.textAlign = "right";
    const every = view.rowHeight >= 13 ? 1 : Math.ceil(13 / view.rowHeight / 4) * 4;
    for (let slot = 0; slot < view.rows; slot++) {
      const y = view.yOf(slot);
      if (slot % 2 === 0) {
        context.fillStyle = this.colours.faint;
        context.fillRect(view.gutter, y, view.width - view.gutter, view.rowHeight);
      }
      if (slot % every === 0) {
        context.fillStyle = this.colours.muted;
        context.fillText(String(slot + 1), view.gutter - 8, y + Math.max(view.rowHeight / 2, 6));
      }
    }
  }

  // The requests of this page's chat, in a frame of their own colour.
  drawOwn() {
    const { context, view, model } = this;
    context.strokeStyle = this.colours.own;
    context.lineWidth = Math.min(3, Math.max(1.5, view.rowHeight / 6));
    const inset = context.lineWidth / 2;
    for (const [slot, stays] of this.marks.own.size ? model.slots.entries() : []) {
      for (let index = stays.length - 1; index >= 0 && stays[index].to > view.left; index--) {
        const stay = stays[index];
        if (!this.marks.own.has(stay.request.id)) continue;
        const x = view.xOf(stay.from) + inset;
        const width = view.xOf(Math.min(stay.to, model.nextCol)) - x - inset;
        context.strokeRect(x, view.yOf(slot) + inset, Math.max(1, width), view.rowHeight - 2 * inset);
      }
    }
  }

  // All stays of a request in the timeline.
  drawOutline(request) {
    const { context, view, model } = this;
    context.strokeStyle = this.colours.text;
    context.lineWidth = 1.5;
    for (const [slot, stays] of model.slots.entries()) {
      for (const stay of stays) {
        if (stay.request !== request) continue;
        const x = view.xOf(stay.from);
        context.strokeRect(x, view.yOf(slot) + 0.75, view.xOf(Math.min(stay.to, model.nextCol)) - x, view.rowHeight - 1.5);
      }
    }
  }

  drawBreaks() {
    const { context, view } = this;
    context.fillStyle = this.colours.muted;
    for (const col of this.model.breaks) context.fillRect(view.xOf(col) - 1, 0, 2, view.axisTop);
    context.textAlign = "left";
    context.setLineDash([2, 3]);
    context.strokeStyle = this.colours.muted;
    context.lineWidth = 1.5;
    for (const { x } of this.pauses) {
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, view.axisTop);
      context.stroke();
    }
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
    const taken = [];
    for (const { x, seconds } of this.pauses) {
      if (x < view.gutter + 20 || x > view.width - 30 || taken.some((other) => Math.abs(other - x) < LABEL_ROOM)) continue;
      context.fillText(`${formatSeconds(seconds)} idle`, x, view.axisTop + 12);
      taken.push(x);
    }
    for (let col = Math.ceil(Math.max(model.firstCol, view.left) / every) * every; col < Math.min(model.nextCol, view.right); col += every) {
      const step = model.stepAt(col);
      const x = view.xOf(col + 0.5);
      if (!step || x < view.gutter + 20 || x > view.width - 24 || taken.some((other) => Math.abs(other - x) < LABEL_ROOM)) continue;
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
