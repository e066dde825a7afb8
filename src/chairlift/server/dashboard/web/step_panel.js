// One step: its token budget, measured against predicted time, and attention mask.

import { Picture, SMALL_FONT, pointerOn } from "./canvas.js";
import { byId, element, formatCount, formatPercent, formatSeconds, setText, shortId } from "./format.js";
import { MaskLayout, drawMask } from "./mask.js";
import { palette } from "./theme.js";

const PART_NAMES = ["schedule", "build", "forward", "sample", "apply"];
const SHOWN_TIMES = 120;

export class StepPanel {
  constructor(app) {
    this.app = app;
    this.mask = new Picture(byId("mask-canvas"), (context, width, height) => this.drawMask(context, width, height));
    this.times = new Picture(byId("times-canvas"), (context, width, height) => this.drawTimes(context, width, height));
    byId("mask-canvas").addEventListener("pointermove", (event) => this.explain(event));
    byId("mask-canvas").addEventListener("pointerleave", () => setText(byId("mask-status"), ""));
  }

  get col() {
    return this.app.cursor ?? this.app.model.nextCol - 1;
  }

  refresh() {
    this.mask.refresh();
    this.times.refresh();
  }

  update() {
    const step = this.app.model.stepAt(this.col);
    byId("step-body").hidden = !step;
    byId("step-empty").hidden = Boolean(step);
    if (!step) return;
    setText(byId("step-which"), `step ${formatCount(step.step)}${this.app.cursor === null ? ", the last one" : ""}`);
    this.showBudget(step);
    this.showTimes(step);
    this.mask.invalidate();
    this.times.invalidate();
  }

  showBudget(step) {
    const used = step.decode + step.prefill;
    const most = Math.max(step.limit, used + step.padding, 1);
    const kinds = { decode: step.decode, prefill: step.prefill, padding: step.padding };
    for (const [kind, count] of Object.entries(kinds)) {
      byId(`budget-${kind}`).style.width = `${(100 * count) / most}%`;
      setText(byId(`budget-${kind}-count`), formatCount(count));
    }
    setText(byId("budget-free-count"), formatCount(Math.max(0, most - used - step.padding)));
    const text = `${formatCount(used)} of ${formatCount(step.limit)} tokens (${formatPercent(used / most)})`;
    setText(byId("budget-status"), text);
    byId("budget-bar").setAttribute("aria-label", `Token budget: ${text}; ${step.decode} decodes, ${step.prefill} prompt tokens, ${step.padding} padding`);
  }

  showTimes(step) {
    setText(byId("time-measured"), formatSeconds(step.seconds));
    setText(byId("time-predicted"), step.predicted ? formatSeconds(step.predicted) : "not yet");
    setText(byId("time-error"), step.predicted ? `${(step.seconds / step.predicted).toFixed(2)}×` : "–");
    const total = step.parts.reduce((sum, part) => sum + part, 0) || 1;
    byId("time-parts").replaceChildren(...step.parts.map((seconds, index) =>
      element("li", {}, element("span", {}, PART_NAMES[index]), element("meter", { value: seconds / total, "aria-label": PART_NAMES[index] }),
        element("span", { class: "number" }, formatSeconds(seconds)))));
  }

  // Measured times as bars, predicted times as dots over them.
  drawTimes(context, width, height) {
    const { model } = this.app;
    const colours = palette();
    const last = Math.min(model.nextCol - 1, this.col + (this.app.cursor === null ? 0 : 20));
    const first = Math.max(model.firstCol, last - SHOWN_TIMES + 1);
    const steps = model.steps.slice(first - model.firstCol, last + 1 - model.firstCol);
    const most = percentileOf(steps.map((step) => Math.max(step.seconds, step.predicted)), 0.98) * 1.15 || 1;
    const barWidth = width / SHOWN_TIMES;
    const top = 14;
    const yOf = (seconds) => height - Math.min(1, seconds / most) * (height - top);
    steps.forEach((step, index) => {
      const x = index * barWidth;
      context.fillStyle = first + index === this.col ? colours.text : step.prefill ? colours.prefill : colours.decode;
      context.fillRect(x, yOf(step.seconds), Math.max(1, barWidth - 1), height);
      if (!step.predicted) return;
      context.fillStyle = colours.preempt;
      context.fillRect(x - 0.5, yOf(step.predicted) - 1, barWidth + 0.5, 2);
    });
    context.font = SMALL_FONT;
    context.fillStyle = colours.muted;
    context.textAlign = "left";
    context.textBaseline = "top";
    context.fillText(formatSeconds(most), 0, 0);
  }

  drawMask(context, width, height) {
    const work = this.app.model.workAt(this.col).sort((a, b) => order(a) - order(b));
    this.layout = new MaskLayout(work, width, height);
    drawMask(context, this.layout, width, height);
    byId("mask-canvas").setAttribute("aria-label",
      `Attention mask: ${this.layout.rows} tokens of ${work.length} requests, each sees only its own request's past`);
  }

  explain(event) {
    const found = this.layout && this.layout.at(...pointerOn(byId("mask-canvas"), event));
    if (!found) return setText(byId("mask-status"), "");
    const { box, row, col } = found;
    const position = box.start + row;
    let what = `sees positions 0 to ${position} of its own request: ${box.start} cached, ${row + 1} new`;
    if (col !== null) what = col <= position ? `may see position ${col} (${col < box.start ? "cached" : "new"})` : `may not see position ${col}: it comes later`;
    setText(byId("mask-status"), `${shortId(box.request.id)}, token ${position} ${what}`);
  }
}

function order(chunk) {
  return (chunk.part.kind === "prefill" ? 1e9 : 0) + chunk.request.handle;
}

function percentileOf(values, share) {
  const sorted = values.slice().sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] || 0;
}
