// The visible part of the timeline: range and width of the columns, number and height of the slots.

const GUTTER = 30;
const AXIS = 20;
const WIDEST = 48;
const NARROWEST = 0.05;

export class LiftView {
  constructor() {
    this.colWidth = 9;
    this.right = 0; // the column at the right edge, fractional while scrolling
    this.isLive = true;
  }

  layout(width, height, model) {
    this.width = width;
    this.height = height;
    this.rows = this.rowsFor(model);
    this.rowHeight = (height - AXIS) / this.rows;
  }

  // Show empty slots, but not hundreds of them.
  rowsFor(model) {
    const maxSlots = model.key ? model.key.slots : 8;
    return Math.min(Math.max(maxSlots, model.slots.length), Math.max(8, Math.ceil(model.slots.length / 8) * 8));
  }

  get gutter() {
    return GUTTER;
  }

  get axisTop() {
    return this.height - AXIS;
  }

  get visibleCols() {
    return (this.width - GUTTER) / this.colWidth;
  }

  get left() {
    return this.right - this.visibleCols;
  }

  xOf(col) {
    return GUTTER + (col - this.left) * this.colWidth;
  }

  yOf(slot) {
    return slot * this.rowHeight;
  }

  colAt(x) {
    return Math.floor((x - GUTTER) / this.colWidth + this.left);
  }

  slotAt(y) {
    const slot = Math.floor(y / this.rowHeight);
    return y < this.axisTop && slot < this.rows ? slot : -1;
  }

  // Scroll smoothly towards the newest step; false once it is reached.
  follow(model, isCalm) {
    const target = model.nextCol + 0.5;
    const distance = target - this.right;
    if (!this.isLive || Math.abs(distance) < 0.01) return false;
    this.right = isCalm || distance > this.visibleCols || distance < 0 ? target : this.right + distance * 0.25;
    if (target - this.right < 0.02) this.right = target;
    return true;
  }

  zoom(factor, model, around = this.width) {
    const col = (around - GUTTER) / this.colWidth + this.left;
    this.colWidth = Math.min(WIDEST, Math.max(NARROWEST, this.colWidth * factor));
    if (!this.isLive) this.pan(col - ((around - GUTTER) / this.colWidth + this.left), model);
  }

  showSteps(count) {
    this.colWidth = Math.min(WIDEST, Math.max(NARROWEST, (this.width - GUTTER) / Math.max(1, count)));
  }

  pan(cols, model) {
    const least = model.firstCol + Math.min(this.visibleCols, model.steps.length);
    this.right = Math.max(least, this.right + cols);
    this.isLive = this.right >= model.nextCol;
    if (this.isLive) this.right = model.nextCol + 0.5;
  }

  reveal(col, model) {
    if (col < this.left) this.pan(col - this.left - 1, model);
    else if (col >= this.right) this.pan(col - this.right + 1, model);
  }
}
