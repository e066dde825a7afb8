// The KV pool as a map: one cell per block.

import { Picture, hatching, pointerOn } from "./canvas.js";
import { byId, element, formatCount, formatPercent, setText, shortId } from "./format.js";
import { ownerColour, ownerMark, palette } from "./theme.js";

export class BlocksPanel {
  constructor(app) {
    this.app = app;
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
    this.fitHeight(blocks.count);
    this.showTable();
    this.picture.invalidate();
  }

  // A small pool gets a small map.
  fitHeight(count) {
    if (count === this.fittedCount || !this.canvas.clientWidth) return;
    this.fittedCount = count;
    const rows = Math.ceil(count / Math.floor(this.canvas.clientWidth / 26));
    this.canvas.style.height = `${Math.max(60, Math.min(250, rows * 26))}px`;
  }

  layout(width, height) {
    const { count } = this.app.model.blocks;
    let size = Math.min(26, Math.max(2, Math.floor(Math.sqrt((width * height) / Math.max(1, count)))));
    while (size > 2 && Math.ceil(count / Math.floor(width / size)) * size > height) size--;
    this.size = size;
    this.perRow = Math.max(1, Math.floor(width / size));
  }

  draw(context, width, height) {
    const { blocks } = this.app.model;
    const colours = palette();
    this.layout(width, height);
    const kept = hatching(context, colours.cached, 4, 1);
    const highlighted = new Set(this.app.selected ? this.app.selected.table : []);
    const gap = this.size > 5 ? 1.5 : this.size > 3 ? 1 : 0;
    for (let block = 0; block < blocks.count; block++) {
      const x = (block % this.perRow) * this.size;
      const y = Math.floor(block / this.perRow) * this.size;
      const side = this.size - gap;
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
      if (highlighted.has(block)) this.frame(context, colours.text, x, y, side);
    }
    context.globalAlpha = 1;
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
    const col = Math.floor(x / this.size);
    return col < this.perRow ? Math.floor(y / this.size) * this.perRow + col : -1;
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
