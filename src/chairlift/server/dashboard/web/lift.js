// The lift: a live timeline with hover, pan, zoom and selection.

import { Picture, pointerOn } from "./canvas.js";
import { byId, element, formatSeconds, setText, shortId } from "./format.js";
import { LiftDrawing } from "./lift_draw.js";
import { LiftTiles } from "./lift_tiles.js";
import { LiftView } from "./lift_view.js";

const ROW = 20; // height of a slot in pixels, if there are few
const MOST_HEIGHT = 460;

export class LiftPanel {
  constructor(app) {
    this.app = app;
    this.view = new LiftView();
    this.tiles = new LiftTiles();
    this.canvas = byId("lift-canvas");
    this.tip = byId("tip");
    this.hovered = null;
    this.cursorSlot = 0;
    this.isCalm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.picture = new Picture(this.canvas, (context, width, height) => this.draw(context, width, height));
    this.listen();
  }

  draw(context, width, height) {
    const { model } = this.app;
    this.view.layout(width, height, model);
    const marks = { hovered: this.hovered, selected: this.app.selected, cursor: this.app.cursor, own: this.app.own };
    new LiftDrawing(context, this.view, model, this.tiles, marks).draw();
  }

  refresh() {
    const { model } = this.app;
    if (this.view.width && this.view.follow(model, this.isCalm)) this.picture.invalidate();
    this.picture.refresh();
  }

  update() {
    const { model } = this.app;
    this.picture.invalidate();
    const rows = this.view.rowsFor(model);
    const height = Math.min(MOST_HEIGHT, Math.max(200, rows * ROW)) + 20;
    if (this.canvas.clientHeight !== height) this.canvas.style.height = `${height}px`;
    const maxSlots = model.key ? model.key.slots : 0;
    const summary = `${model.slotsTaken} of ${maxSlots} slots taken, ${sumOf(model.reasons)} waiting, ${model.nextCol} steps seen`;
    setText(byId("lift-summary"), summary);
    this.canvas.setAttribute("aria-label", `Timeline of slots and steps. ${summary}.`);
    byId("lift-live").hidden = this.view.isLive && this.app.cursor === null;
    byId("lift-empty").hidden = model.nextCol > 0;
  }

  goLive() {
    this.view.isLive = true;
    this.app.setCursor(null);
  }

  zoom(factor) {
    this.view.zoom(factor, this.app.model);
    this.app.update();
  }

  showAll() {
    this.view.isLive = true;
    this.view.showSteps(this.app.model.steps.length + 1);
    this.app.update();
  }

  listen() {
    byId("lift-in").addEventListener("click", () => this.zoom(1.6));
    byId("lift-out").addEventListener("click", () => this.zoom(1 / 1.6));
    byId("lift-all").addEventListener("click", () => this.showAll());
    byId("lift-live").addEventListener("click", () => this.goLive());
    const { canvas } = this;
    canvas.addEventListener("keydown", (event) => this.onKey(event));
    canvas.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.onDown(event));
    canvas.addEventListener("pointermove", (event) => this.onMove(event));
    canvas.addEventListener("pointerup", (event) => this.onUp(event));
    canvas.addEventListener("pointerleave", () => this.hover(null));
    canvas.addEventListener("pointercancel", () => (this.drag = null));
  }

  onWheel(event) {
    const isZoom = event.ctrlKey || event.metaKey || event.shiftKey;
    const isSideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!isZoom && !isSideways) return; // let the page scroll
    event.preventDefault();
    const [x] = pointerOn(this.canvas, event);
    if (isSideways && !isZoom) this.view.pan(event.deltaX / this.view.colWidth, this.app.model);
    else this.view.zoom(Math.exp(-(event.deltaY || event.deltaX) / 300), this.app.model, x);
    this.app.update();
  }

  onDown(event) {
    this.drag = { x: event.clientX, moved: false };
    this.canvas.setPointerCapture(event.pointerId);
  }

  onMove(event) {
    if (this.drag && event.buttons) {
      const distance = event.clientX - this.drag.x;
      if (Math.abs(distance) < 4 && !this.drag.moved) return;
      this.drag.moved = true;
      this.drag.x = event.clientX;
      this.view.pan(-distance / this.view.colWidth, this.app.model);
      this.hover(null);
      this.app.update();
    } else {
      this.hover(event);
    }
  }

  onUp(event) {
    const wasClick = this.drag && !this.drag.moved;
    this.drag = null;
    if (!wasClick) return;
    const [x, y] = pointerOn(this.canvas, event);
    const col = this.view.colAt(x);
    if (this.app.model.stepAt(col)) this.app.setCursor(col);
    const request = this.requestAt(this.view.slotAt(y), col);
    if (request) this.app.openStory(request);
  }

  requestAt(slot, col) {
    const stays = this.app.model.slots[slot] || [];
    const found = stays.find((stay) => stay.from <= col && col < stay.to);
    return found && col < this.app.model.nextCol ? found.request : null;
  }

  hover(event) {
    let [x, y, col, request] = [0, 0, -1, null];
    if (event) {
      [x, y] = pointerOn(this.canvas, event);
      col = this.view.colAt(x);
      request = this.requestAt(this.view.slotAt(y), col);
    }
    if (request !== this.hovered) {
      this.hovered = request;
      this.picture.invalidate();
    }
    this.canvas.style.cursor = request ? "pointer" : "";
    this.showTip(event && this.app.model.stepAt(col) && x > this.view.gutter ? event : null, request, col);
  }

  showTip(event, request, col) {
    this.tip.hidden = !event;
    if (!event) return;
    const step = this.app.model.stepAt(col);
    const lines = request ? describeCell(this.app.model, request, col) : [];
    lines.push(`step ${step.step}: ${step.decode} decodes + ${step.prefill} prompt tokens, ${formatSeconds(step.seconds)}`);
    this.tip.replaceChildren(...lines.map((line, index) => element(index ? "div" : "strong", {}, line)));
    const width = this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
    this.tip.style.top = `${Math.min(event.clientY + 16, innerHeight - this.tip.offsetHeight - 8)}px`;
  }

  onKey(event) {
    const { model } = this.app;
    const col = this.app.cursor ?? model.nextCol - 1;
    const actions = {
      ArrowLeft: () => this.moveCursor(col - (event.shiftKey ? 10 : 1)),
      ArrowRight: () => this.moveCursor(col + (event.shiftKey ? 10 : 1)),
      ArrowUp: () => this.moveSlot(-1, col),
      ArrowDown: () => this.moveSlot(1, col),
      Home: () => this.moveCursor(model.firstCol),
      End: () => this.goLive(),
      Escape: () => this.goLive(),
      "+": () => this.zoom(1.6),
      "=": () => this.zoom(1.6),
      "-": () => this.zoom(1 / 1.6),
      Enter: () => {
        const request = this.requestAt(this.cursorSlot, col);
        if (request) this.app.openStory(request);
      },
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  }

  moveCursor(col) {
    const { model } = this.app;
    if (!model.steps.length) return;
    const chosen = Math.min(model.nextCol - 1, Math.max(model.firstCol, col));
    this.app.setCursor(chosen);
    this.view.isLive = false;
    this.view.reveal(chosen, model);
    this.announce(chosen);
  }

  moveSlot(by, col) {
    this.cursorSlot = Math.min(this.view.rows - 1, Math.max(0, this.cursorSlot + by));
    this.hovered = this.requestAt(this.cursorSlot, col);
    this.picture.invalidate();
    this.announce(col);
  }

  announce(col) {
    const request = this.requestAt(this.cursorSlot, col);
    const step = this.app.model.stepAt(col);
    const what = request ? describeCell(this.app.model, request, col).join(", ") : "empty";
    if (step) setText(byId("lift-status"), `Step ${step.step}, slot ${this.cursorSlot + 1}: ${what}`);
  }
}

function describeCell(model, request, col) {
  const part = request.partAt(col);
  const lines = [`${shortId(request.id)}: ${request.prompt} + ${request.outputs} tokens`];
  if (part && part.kind === "prefill") lines.push(`prompt tokens ${part.start} to ${part.start + part.count - 1} (${part.count})`);
  else if (part && part.proposed) lines.push(`drafts: ${part.accepted} of ${part.proposed} accepted`);
  else if (part) lines.push(`decodes token ${part.start + col - part.col}`);
  else if (request.end && col > request.end.col) lines.push("finished; its row is still computed as padding");
  else lines.push("running, but not in this step");
  return lines;
}

function sumOf(counts) {
  return Object.values(counts).reduce((sum, count) => sum + count, 0);
}
