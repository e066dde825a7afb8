// The KV pool: a strip of all of it, and a map with a cell for each block of the parts that are in use.

import { Picture, SMALL_FONT, hatching, pointerOn } from "./canvas.js";
import { byId, element, formatCount, formatPercent, setText, shortId } from "./format.js";
import { ownerColour, ownerMark, palette } from "./theme.js";

const GROUP = 4; // blocks that are drawn together if one of them is in use
const GROUP_GAP = 5; // between groups
const LARGEST = 22; // of a block, in pixels
const STRIP = 22; // height of the strip and the space below it
const LABELS = 46; // width of the numbers at the left
const MAP_HEIGHT = 280;

export class BlocksPanel {
  constructor(app) {
    this.app = app;
    this.groups = [];
    this.canvas = byId("blocks-canvas");
    this.picture = new Picture(this.canvas, (context, width, height) => this.draw(context, width, height));
    this.canvas.addEventListener("pointermove", (event) => this.explain(event));
    this.canvas.addEventListener("pointerleave", () => setText(byId("blocks-status"), ""));
    this.canvas.addEventListener("click", (event) => {
      const owner = this.app.model.blocks.ownerOf(this.blockAt(event));
      if (owner) this.app.openStory(owner);
    });
  }

  refresh() {
    this.picture.refresh();
  }

  update() {
    const { blocks } = this.app.model;
    const found = blocks.tally();
    setText(byId("blocks-used"), formatCount(found.used));
    setText(byId("blocks-total"), `of ${formatCount(blocks.count)}`);
    setText(byId("blocks-share"), formatPercent(blocks.count ? found.used / blocks.count : 0));
    setText(byId("blocks-shared"), formatCount(found.shared));
    setText(byId("blocks-kept"), formatCount(found.kept));
    setText(byId("blocks-evicted"), formatCount(blocks.evictions || 0));
    this.canvas.setAttribute("aria-label",
      `KV pool of ${blocks.count} blocks: ${found.used} used, ${found.shared} of them shared, ${found.kept} cached but free, ${found.empty} empty`);
    setText(byId("blocks-empty"), formatCount(found.empty));
    byId("blocks-none").hidden = found.used + found.kept > 0;
    this.findGroups(blocks);
    this.fitHeight(blocks.count);
    this.showTable();
    this.picture.invalidate();
  }

  // The groups of neighbouring blocks that are not all empty. Only these have cells, so that few used blocks of a large
  // pool can be seen; the strip above them is the whole pool, to scale.
  findGroups(blocks) {
    this.groups = [];
    for (let first = 0; first < blocks.count; first += GROUP) {
      const group = { first, isHeld: false, isKept: false, isEvicted: false };
      for (let block = first; block < Math.min(blocks.count, first + GROUP); block++) {
        if (blocks.references[block]) group.isHeld = true;
        else if (blocks.cached[block]) group.isKept = true;
        else if (blocks.wasJustEvicted(block)) group.isEvicted = true;
      }
      if (group.isHeld || group.isKept || group.isEvicted) this.groups.push(group);
    }
  }

  // The map grows with the blocks in use and does not shrink, so that the page stays where it is.
  fitHeight(count) {
    if (!this.canvas.clientWidth) return;
    if (count !== this.fittedCount) this.rows = 0;
    this.fittedCount = count;
    const perRow = Math.max(1, Math.floor((this.canvas.clientWidth - LABELS) / (GROUP * LARGEST + GROUP_GAP)));
    this.rows = Math.max(this.rows, Math.ceil(this.groups.length / perRow));
    const height = `${Math.min(MAP_HEIGHT, STRIP + this.rows * LARGEST)}px`;
    if (this.canvas.style.height !== height) this.canvas.style.height = height;
  }

  layout(width, height) {
    const fits = (size) => {
      this.perRow = Math.max(1, Math.floor((width - LABELS) / (GROUP * size + GROUP_GAP)));
      return Math.ceil(this.groups.length / this.perRow) * size <= height - STRIP;
    };
    for (this.size = LARGEST; !fits(this.size) && this.size > 2; ) this.size--;
    this.shown = Math.min(this.groups.length, this.perRow * Math.floor((height - STRIP) / this.size));
    this.width = width;
  }

  draw(context, width, height) {
    const { blocks } = this.app.model;
    const colours = palette();
    this.layout(width, height);
    const kept = hatching(context, colours.cached, 4, 1);
    this.drawStrip(context, blocks, colours, kept);
    const highlighted = new Set(this.app.selected ? this.app.selected.table : []);
    const side = this.size - (this.size > 5 ? 1.5 : this.size > 3 ? 1 : 0);
    for (let index = 0; index < this.shown; index++) {
      const y = STRIP + Math.floor(index / this.perRow) * this.size;
      const left = LABELS + (index % this.perRow) * (GROUP * this.size + GROUP_GAP);
      const { first } = this.groups[index];
      if (index % this.perRow === 0 && this.size >= 10) this.drawLabel(context, first, y, colours);
      for (let block = first; block < Math.min(blocks.count, first + GROUP); block++) {
        this.drawBlock(context, block, left + (block - first) * this.size, y, side, { blocks, colours, kept, highlighted });
      }
    }
    context.globalAlpha = 1;
  }

  drawStrip(context, blocks, colours, kept) {
    context.fillStyle = colours.faint;
    context.fillRect(0, 0, this.width, STRIP - 8);
    const scale = this.width / Math.max(1, blocks.count);
    for (const { first, isHeld, isEvicted } of this.groups) {
      context.fillStyle = isHeld ? colours.accent : isEvicted ? colours.preempt : kept;
      context.fillRect(first * scale, 0, Math.max(2, GROUP * scale), STRIP - 8);
    }
    context.strokeStyle = colours.line;
    context.lineWidth = 1;
    context.strokeRect(0.5, 0.5, this.width - 1, STRIP - 9);
  }

  drawLabel(context, first, y, colours) {
    context.font = SMALL_FONT;
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillStyle = colours.muted;
    context.fillText(String(first), LABELS - 6, y + this.size / 2);
  }

  drawBlock(context, block, x, y, side, { blocks, colours, kept, highlighted }) {
    const owner = blocks.references[block] ? blocks.ownerOf(block) : null;
    context.globalAlpha = highlighted.size && !highlighted.has(block) ? 0.3 : 1;
    context.fillStyle = owner ? ownerColour(owner.handle) : blocks.references[block] ? colours.muted : colours.faint;
    context.fillRect(x, y, side, side);
    if (!blocks.references[block] && blocks.cached[block]) {
      context.fillStyle = kept;
      context.fillRect(x, y, side, side);
    }
    if (owner && side >= 8) this.drawMark(context, ownerMark(owner.handle), x, y, side);
    if (blocks.references[block] > 1) this.drawReferences(context, blocks.references[block], x, y, side, colours);
    if (blocks.wasJustEvicted(block)) this.frame(context, colours.preempt, x, y, side);
    if (owner && this.app.own.has(owner.id)) this.frame(context, colours.own, x, y, side);
    if (highlighted.has(block)) this.frame(context, colours.text, x, y, side);
  }

  drawMark(context, mark, x, y, side) {
    if (!mark) return;
    context.fillStyle = "rgba(255, 255, 255, 0.75)";
    const small = Math.max(2, side / 5);
    if (mark === 1) context.fillRect(x + 1, y + side - small, side - 2, small - 1);
    else if (mark === 2) context.fillRect(x + 1, y + 1, small - 1, side - 2);
    else context.fillRect(x + side - small, y + 1, small - 1, small);
  }

  drawReferences(context, count, x, y, side, colours) {
    if (side < 11) {
      context.fillStyle = colours.card;
      context.fillRect(x + side / 2 - 1, y + side / 2 - 1, 2, 2);
      return;
    }
    context.font = `600 ${Math.min(11, side - 3)}px system-ui, sans-serif`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillStyle = "#fff";
    context.fillText(count > 99 ? "99" : String(count), x + side / 2, y + side / 2 + 0.5);
  }

  frame(context, colour, x, y, side) {
    context.strokeStyle = colour;
    context.lineWidth = side > 8 ? 2 : 1;
    context.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
  }

  blockAt(event) {
    const [x, y] = pointerOn(this.canvas, event);
    if (y < STRIP) return Math.floor((x / this.width) * this.app.model.blocks.count);
    const [col, row] = [Math.floor((x - LABELS) / (GROUP * this.size + GROUP_GAP)), Math.floor((y - STRIP) / this.size)];
    const index = row * this.perRow + col;
    if (col < 0 || col >= this.perRow || index >= this.shown) return -1;
    const within = Math.floor((x - LABELS - col * (GROUP * this.size + GROUP_GAP)) / this.size);
    return within < GROUP ? this.groups[index].first + within : -1;
  }

  explain(event) {
    const { blocks } = this.app.model;
    const block = this.blockAt(event);
    if (!(block >= 0 && block < blocks.count)) return setText(byId("blocks-status"), "");
    const references = blocks.references[block];
    const owners = [...blocks.holders].filter((request) => request.table.includes(block)).slice(0, 4);
    let what = blocks.cached[block] ? "free, but its contents are cached" : "empty";
    if (references === 1) what = `held by ${owners.map((owner) => shortId(owner.id)).join("")}`;
    if (references > 1) what = `shared by ${references}: ${owners.map((owner) => shortId(owner.id)).join(", ")}`;
    if (references && blocks.cached[block]) what += ", its contents are indexed";
    setText(byId("blocks-status"), `Block ${block}: ${what}`);
  }

  // The table of the selected request: logical block -> physical block.
  showTable() {
    const request = this.app.selected;
    const list = byId("block-table");
    byId("block-table-part").hidden = !request || !request.table.length;
    if (!request || !request.table.length) return;
    const { blocks } = this.app.model;
    setText(byId("block-table-title"), `Block table of ${shortId(request.id)}: logical → physical`);
    const text = request.table.map((block) => `${block}.${blocks.references[block]}`).join();
    if (list.dataset.shown === text) return;
    list.dataset.shown = text;
    list.replaceChildren(...request.table.map((block, index) =>
      element("li", { title: `tokens ${index * blocks.size} to ${(index + 1) * blocks.size - 1}` },
        element("span", {}, String(index)), "→", element("b", {}, String(block)),
        blocks.references[block] > 1 ? element("em", {}, `×${blocks.references[block]}`) : null)));
  }
}
