// The ragged attention mask of one step, drawn from its chunks: rows are the step's tokens, columns what they attend to.

import { SMALL_FONT, hatching } from "./canvas.js";
import { shortId } from "./format.js";
import { palette } from "./theme.js";

const GAP = 2; // between requests
const WIDEST_TOKEN = 16; // pixels
const HIGHEST_TOKEN = 34;

export class MaskLayout {
  constructor(work, width, height) {
    this.rows = work.reduce((sum, chunk) => sum + chunk.count, 0);
    this.cols = work.reduce((sum, chunk) => sum + chunk.start + chunk.count, 0);
    const gaps = GAP * Math.max(0, work.length - 1);
    const fits = (space, tokens, most) => Math.max(0.02, Math.min(most, (space - Math.min(gaps, space / 3)) / Math.max(1, tokens)));
    this.gapX = Math.min(GAP, width / 3 / Math.max(1, work.length));
    this.gapY = Math.min(GAP, height / 3 / Math.max(1, work.length));
    this.tokenWidth = fits(width, this.cols, WIDEST_TOKEN);
    this.tokenHeight = fits(height, this.rows, HIGHEST_TOKEN);
    let [x, y] = [0, 0];
    this.boxes = work.map((chunk) => {
      const box = { ...chunk, x, y, width: (chunk.start + chunk.count) * this.tokenWidth, height: chunk.count * this.tokenHeight };
      x += box.width + this.gapX;
      y += box.height + this.gapY;
      return box;
    });
  }

  at(x, y) {
    const box = this.boxes.find((each) => y >= each.y && y < each.y + each.height + this.gapY);
    if (!box) return null;
    const row = Math.min(box.count - 1, Math.floor((y - box.y) / this.tokenHeight));
    const inside = x >= box.x && x < box.x + box.width;
    return { box, row, col: inside ? Math.floor((x - box.x) / this.tokenWidth) : null };
  }
}

export function drawMask(context, layout, width, height) {
  const colours = palette();
  const hidden = hatching(context, colours.line, 5, 1);
  context.font = SMALL_FONT;
  for (const box of layout.boxes) {
    const cachedWidth = box.start * layout.tokenWidth;
    context.fillStyle = colours.cached;
    context.fillRect(box.x, box.y, cachedWidth, box.height);
    context.fillStyle = hidden; // later tokens of the same request
    context.fillRect(box.x + cachedWidth, box.y, box.width - cachedWidth, box.height);
    context.fillStyle = box.part.kind === "prefill" ? colours.prefill : colours.decode;
    drawStairs(context, box, layout, cachedWidth);
    if (layout.tokenWidth >= 5 && layout.tokenHeight >= 5) drawCells(context, box, layout, colours.card);
  }
  drawNames(context, layout, width, height, colours);
}

function drawStairs(context, box, layout, cachedWidth) {
  const left = box.x + cachedWidth;
  if (layout.tokenHeight < 1.5) { // too fine for steps: draw a triangle
    context.beginPath();
    context.moveTo(left, box.y);
    context.lineTo(left + box.count * layout.tokenWidth, box.y + box.height);
    context.lineTo(left, box.y + box.height);
    context.fill();
    context.fillRect(left, box.y, Math.max(layout.tokenWidth, 0.8), Math.max(box.height, 0.8));
    return;
  }
  for (let row = 0; row < box.count; row++) {
    context.fillRect(left, box.y + row * layout.tokenHeight, (row + 1) * layout.tokenWidth, layout.tokenHeight);
  }
}

function drawCells(context, box, layout, colour) {
  context.fillStyle = colour;
  for (let col = 1; col < box.start + box.count; col++) context.fillRect(box.x + col * layout.tokenWidth - 0.5, box.y, 1, box.height);
  for (let row = 1; row < box.count; row++) context.fillRect(box.x, box.y + row * layout.tokenHeight - 0.5, box.width, 1);
}

function drawNames(context, layout, width, height, colours) {
  context.fillStyle = colours.muted;
  context.textBaseline = "middle";
  for (const box of layout.boxes) {
    const name = shortId(box.request.id);
    const needed = context.measureText(name).width + 8;
    if (box.height < 11) continue;
    const fitsRight = box.x + box.width + needed < width;
    context.textAlign = fitsRight ? "left" : "right";
    if (fitsRight || box.x > needed) context.fillText(name, fitsRight ? box.x + box.width + 5 : box.x - 5, box.y + box.height / 2);
  }
}
