// Finished steps never change, so narrow columns are drawn once into tiles and then only copied.

import { Layer } from "./canvas.js";
import { LiftCells } from "./lift_cells.js";

const TILE_WIDTH = 128; // pixels
const MOST_TILES = 64;

export class LiftTiles {
  constructor() {
    this.tiles = new Map(); // by tile number
    this.key = "";
    this.newest = new Layer(); // the last tile, which still grows
  }

  draw(context, view, model) {
    const cols = Math.round(TILE_WIDTH / view.colWidth);
    this.checkKey(view, model, cols);
    const end = Math.min(model.nextCol, Math.ceil(view.right) + 1);
    let number = Math.floor(Math.max(model.firstCol, view.left) / cols);
    for (; number * cols < end; number++) {
      const isWhole = (number + 1) * cols < model.nextCol;
      const tile = isWhole ? this.tile(number, cols, view, model) : fillTile(this.newest, model.version, number, cols, view, model);
      tile.put(context, Math.floor(view.xOf(number * cols)), 0);
    }
  }

  // Everything that the tiles depend on.
  checkKey(view, model, cols) {
    const key = [cols, view.colWidth, view.rowHeight, view.axisTop, window.devicePixelRatio, document.documentElement.dataset.theme].join();
    if (key === this.key && this.model === model) return;
    this.key = key;
    this.model = model;
    this.tiles.clear();
    this.newest.key = null;
  }

  tile(number, cols, view, model) {
    let tile = this.tiles.get(number);
    if (!tile) {
      if (this.tiles.size >= MOST_TILES) this.tiles.delete(this.tiles.keys().next().value);
      this.tiles.set(number, (tile = fillTile(new Layer(), "", number, cols, view, model)));
    }
    return tile;
  }
}

function fillTile(layer, version, number, cols, view, model) {
  const width = Math.ceil(cols * view.colWidth) + 1; // overlap by a pixel to avoid seams
  const { colWidth, rowHeight, axisTop } = view;
  const place = { colWidth, rowHeight, axisTop, xOf: (col) => (col - number * cols) * colWidth, yOf: (slot) => view.yOf(slot) };
  const key = [version, number, cols, colWidth, rowHeight].join();
  return layer.fill(width, axisTop, key, (context) => new LiftCells(context, place, model, number * cols, (number + 1) * cols).draw());
}
