// Steps that are over never change: seen from afar, they are drawn once, tile by tile, and then only put in place.

import { LiftCells } from "./lift_cells.js";

const TILE_WIDTH = 128; // pixels
const MOST_TILES = 64;

export class LiftTiles {
  constructor() {
    this.tiles = new Map(); // by the number of the tile
    this.key = "";
  }

  draw(context, view, model) {
    const cols = Math.round(TILE_WIDTH / view.colWidth);
    this.checkKey(view, model, cols);
    const end = Math.min(model.nextCol, Math.ceil(view.right) + 1);
    let number = Math.floor(Math.max(model.firstCol, view.left) / cols);
    for (; (number + 1) * cols < model.nextCol && number * cols < end; number++) {
      const x = Math.floor(view.xOf(number * cols));
      context.drawImage(this.tile(number, cols, view, model), x, 0, Math.ceil(cols * view.colWidth) + 1, view.axisTop); // overlapping: no seams
    }
    if (number * cols < end) new LiftCells(context, view, model, number * cols, end).draw(); // of these, more is to come
  }

  // Everything that a tile's looks depend on.
  checkKey(view, model, cols) {
    const ratio = window.devicePixelRatio || 1;
    const key = [cols, view.colWidth, view.rowHeight, view.axisTop, ratio, document.documentElement.dataset.theme].join();
    if (key === this.key && this.model === model) return;
    this.key = key;
    this.model = model;
    this.tiles.clear();
  }

  tile(number, cols, view, model) {
    let tile = this.tiles.get(number);
    if (!tile) {
      if (this.tiles.size >= MOST_TILES) this.tiles.delete(this.tiles.keys().next().value);
      this.tiles.set(number, (tile = drawTile(number, cols, view, model)));
    }
    return tile;
  }
}

function drawTile(number, cols, view, model) {
  const ratio = window.devicePixelRatio || 1;
  const canvas = document.createElement("canvas");
  canvas.width = Math.ceil(cols * view.colWidth + 1) * ratio;
  canvas.height = Math.ceil(view.axisTop) * ratio;
  const context = canvas.getContext("2d");
  context.scale(canvas.width / (Math.ceil(cols * view.colWidth) + 1), canvas.height / view.axisTop);
  const place = {
    colWidth: view.colWidth,
    rowHeight: view.rowHeight,
    axisTop: view.axisTop,
    xOf: (col) => (col - number * cols) * view.colWidth,
    yOf: (seat) => view.yOf(seat),
  };
  new LiftCells(context, place, model, number * cols, (number + 1) * cols).draw();
  return canvas;
}
