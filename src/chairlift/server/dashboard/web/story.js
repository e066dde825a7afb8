// The story of one request, from its recorded events.

import { Picture, SMALL_FONT } from "./canvas.js";
import { byId, element, formatCount, formatPercent, formatSeconds, missWords, setText, shortId, waitWords, wordsOf } from "./format.js";
import { palette } from "./theme.js";

const REFRESH_TEXT = 1000; // milliseconds between fetches of the text of a running request

export class StoryPanel {
  constructor(app) {
    this.app = app;
    this.box = byId("story");
    this.gaps = new Picture(byId("gaps-canvas"), (context, width, height) => this.drawGaps(context, width, height));
    byId("story-close").addEventListener("click", () => this.close());
    this.box.addEventListener("keydown", (event) => event.key === "Escape" && this.close());
    this.textAt = 0;
    this.tokenGaps = [];
  }

  open(request) {
    this.returnTo = document.activeElement;
    this.app.selected = request;
    this.textAt = 0;
    this.box.hidden = false;
    setText(byId("story-text"), "");
    this.app.update();
    byId("story-close").focus({ preventScroll: true });
  }

  close() {
    this.box.hidden = true;
    this.app.selected = null;
    this.app.update();
    if (this.returnTo && this.returnTo.focus) this.returnTo.focus({ preventScroll: true });
  }

  refresh() {
    if (!this.box.hidden) this.gaps.refresh();
  }

  update() {
    const request = this.app.selected;
    if (this.box.hidden || !request) return;
    const { model } = this.app;
    setText(byId("story-title"), shortId(request.id));
    byId("story-title").title = request.id;
    setText(byId("story-state"), stateWords(request));
    byId("story-state").dataset.state = request.end ? request.end.reason : request.state;
    this.showFacts(factsOf(model, request));
    this.showEvents(eventsOf(model, request));
    this.tokenGaps = gapsOf(model, request);
    this.gaps.invalidate();
    byId("story-gaps").hidden = this.tokenGaps.length < 2;
    this.fetchText(request);
  }

  showFacts(facts) {
    const nodes = facts.flatMap(([name, value, id]) => [element("dt", {}, name), element("dd", { id: id || null }, value)]);
    byId("story-facts").replaceChildren(...nodes);
  }

  showEvents(events) {
    const text = events.map((event) => event.when + event.what).join();
    if (byId("story-events").dataset.shown === text) return;
    byId("story-events").dataset.shown = text;
    byId("story-events").replaceChildren(...events.map(({ when, what, kind }) =>
      element("li", { "data-kind": kind }, element("span", { class: "number" }, when), element("span", {}, what))));
  }

  drawGaps(context, width, height) {
    const colours = palette();
    const values = this.tokenGaps;
    const most = Math.max(...values, 1e-6);
    const bar = Math.min(10, width / values.length);
    context.fillStyle = colours.decode;
    values.forEach((value, index) => {
      const size = Math.max(1, (value / most) * (height - 14));
      context.fillRect(index * bar, height - size, Math.max(0.6, bar - (bar > 3 ? 1 : 0)), size);
    });
    context.font = SMALL_FONT;
    context.fillStyle = colours.muted;
    context.textBaseline = "top";
    context.textAlign = "left";
    context.fillText(`longest ${formatSeconds(most)}`, 0, 0);
  }

  async fetchText(request) {
    const isOver = request.state === "done";
    if (!this.app.isLive || Date.now() < this.textAt) return;
    this.textAt = isOver ? Infinity : Date.now() + REFRESH_TEXT;
    try {
      const response = await this.app.connection.fetch(`dashboard/requests/${encodeURIComponent(request.id)}`);
      if (this.app.selected !== request) return;
      if (!response.ok) return setText(byId("story-text"), "Its text is not kept, or was sent with another key.");
      const { prompt, prompt_is_whole: isWhole, output, output_is_whole: isAll } = await response.json();
      byId("story-text").replaceChildren(
        element("h4", {}, isWhole ? "Prompt" : "End of the prompt"), element("pre", {}, prompt),
        element("h4", {}, isAll ? "Output" : "Beginning of the output"), element("pre", { id: "story-output" }, output));
    } catch {
      setText(byId("story-text"), "The server does not answer.");
    }
  }
}

function stateWords(request) {
  if (request.end) return request.end.reason;
  return { waiting: "waiting", running: `in slot ${request.slot + 1}`, idle: "finished", done: "gone" }[request.state];
}

function factsOf(model, request) {
  const chunks = request.parts.filter((part) => part.kind === "prefill");
  const end = request.end ? request.end.time : model.now;
  const sorted = gapsOf(model, request).sort((a, b) => a - b);
  const gapAt = (share) => (sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] : null);
  const admission = request.admissions[0];
  const facts = [
    ["Prompt tokens", formatCount(request.prompt), "story-prompt"],
    ["of them cached", admission ? `${formatCount(admission.cached)} (${formatPercent(admission.cached / request.prompt)})` : "–", "story-cached"],
    ["Output tokens", formatCount(request.outputs), "story-outputs"],
    ["Prompt chunks", chunks.length ? `${chunks.length}: ${listOf(chunks.map((chunk) => chunk.count))}` : "–"],
    ["Waited", admission ? formatSeconds(admission.time - request.arrival) : formatSeconds(end - request.arrival)],
    ["First token after", request.firstToken === null ? "–" : formatSeconds(request.firstToken - request.arrival), "story-ttft"],
    ["Between tokens", sorted.length ? `${formatSeconds(gapAt(0.5))} (p95 ${formatSeconds(gapAt(0.95))})` : "–"],
    ["Total time", formatSeconds(end - request.arrival)],
    ["Tenant", model.tenantName(request)],
    ["Blocks", formatCount(request.table.length)],
  ];
  if (request.serviceClass) facts.push(["Class", request.serviceClass, "story-class"]);
  if (request.preempts.length) facts.push(["Preempted", `${request.preempts.length} times`]);
  if (request.proposed) facts.push(["Drafts accepted", `${request.accepted} of ${request.proposed}`]);
  return facts;
}

function listOf(counts) {
  return counts.length > 6 ? `${counts.slice(0, 5).join(", ")}, …` : counts.join(", ");
}

// The time between consecutive tokens.
function gapsOf(model, request) {
  const gaps = [];
  let before = request.firstToken;
  for (const part of request.parts) {
    if (part.kind !== "decode") continue;
    for (let col = part.col; col < part.col + part.n; col++) {
      const step = model.stepAt(col);
      if (step && before !== null) gaps.push(step.time - before);
      before = step ? step.time : before;
    }
  }
  return gaps;
}

function eventsOf(model, request) {
  const events = [];
  const add = (time, what, kind) => events.push({ time, what, kind });
  add(request.arrival, `queued with ${formatCount(request.prompt)} prompt tokens, up to ${formatCount(request.maxNew)} new ones`, "queue");
  for (const wait of request.waits) add(wait.from + 1e-9, `waits: ${waitWords(wait.reason)}`, "wait");
  for (const admission of request.admissions) {
    const miss = admission.miss ? `; ${missWords(admission.miss)}` : "";
    const swapped = admission.swapped ? `, ${admission.swapped} back from host memory` : "";
    add(admission.time, `admitted, ${formatCount(admission.cached)} tokens cached${swapped}${miss}`, "admit");
  }
  for (const part of request.parts.filter((each) => each.kind === "prefill").slice(0, 40)) {
    const step = model.stepAt(part.col);
    if (step) add(step.time, `prompt tokens ${part.start} to ${part.start + part.count - 1} computed`, "prefill");
  }
  for (const preempt of request.preempts) add(preempt.time, preempt.swapped ? "preempted: its blocks go to host memory" : "preempted: its blocks are taken", "preempt");
  if (request.firstToken !== null) add(request.firstToken + 1e-9, "first token", "decode");
  if (request.end) add(request.end.time + 2e-9, `ends: ${wordsOf(request.end.reason)}, ${formatCount(request.outputs)} tokens`, "end");
  events.sort((a, b) => a.time - b.time);
  return events.map((event) => ({ ...event, when: `+${formatSeconds(Math.max(0, event.time - request.arrival))}` }));
}
