// The queue and the service: wait reasons, rates and cache hits.

import { byId, element, formatCount, formatPercent, formatSeconds, missWords, setText, shortId, waitWords, wordsOf } from "./format.js";

const RATE_SECONDS = 5;
const SHOWN_ROWS = 8;

export class ServicePanel {
  constructor(app) {
    this.app = app;
  }

  refresh() {}

  update() {
    const { model } = this.app;
    this.showTiles(model);
    this.showQueue(model);
    this.showRunning(model);
    this.showTimes(model);
    this.showPrefix(model);
    this.showTenants(model);
    this.showTotals(model);
  }

  showTiles(model) {
    const maxSlots = model.key ? model.key.slots : 0;
    const rate = ratesOf(model);
    const { blocks } = model;
    setText(byId("tile-slots"), `${model.slotsTaken} / ${maxSlots}`);
    setText(byId("tile-waiting"), formatCount(Object.values(model.reasons).reduce((sum, count) => sum + count, 0)));
    setText(byId("tile-rate"), formatCount(rate.outputs));
    setText(byId("tile-ttft"), formatSeconds(model.times.ttft.percentile(0.5)));
    setText(byId("tile-itl"), formatSeconds(model.times.itl.percentile(0.5)));
    const used = model.steps.length && blocks.count ? blocks.tally().used / blocks.count : 0;
    setText(byId("tile-kv"), formatPercent(used));
    byId("states").hidden = !model.states;
    if (model.states) {
      const [held, snapshots, total] = model.states;
      setText(byId("tile-states"), `${held} + ${snapshots} kept / ${total}`);
    }
    setText(byId("tile-hits"), formatPercent(model.tokens.prompt ? model.tokens.cached / model.tokens.prompt : 0));
    setText(byId("rate-budget"), formatPercent(rate.budget));
    setText(byId("rate-padding"), formatPercent(rate.padding));
    setText(byId("rate-busy"), formatPercent(rate.busy));
  }

  showQueue(model) {
    const reasons = Object.entries(model.reasons).sort((a, b) => b[1] - a[1]);
    byId("queue-reasons").replaceChildren(...reasons.map(([reason, count]) =>
      element("li", {}, element("b", { class: "number" }, formatCount(count)), waitWords(reason))));
    fillRows(byId("queue-rows"), model.waiting.slice(0, SHOWN_ROWS), ({ request, reason }) => [
      this.storyButton(request), model.tenantName(request), formatCount(request.prompt),
      formatSeconds(model.now - request.arrival), waitWords(reason)]);
    byId("queue-empty").hidden = model.waiting.length > 0;
    byId("queue-table").hidden = model.waiting.length === 0;
  }

  showRunning(model) {
    const running = model.occupants.filter((request) => request && request.state === "running");
    fillRows(byId("running-rows"), running.slice(0, SHOWN_ROWS), (request) => [
      this.storyButton(request), String(request.slot + 1), formatCount(request.prompt), formatCount(request.outputs),
      formatSeconds(model.now - request.arrival)]);
    byId("running-empty").hidden = running.length > 0;
    byId("running-table").hidden = running.length === 0;
    setText(byId("running-more"), running.length > SHOWN_ROWS ? `and ${running.length - SHOWN_ROWS} more` : "");
  }

  storyButton(request) {
    return element("button", { class: "link", type: "button", onclick: () => this.app.openStory(request) }, shortId(request.id));
  }

  showTimes(model) {
    for (const name of ["ttft", "itl", "e2e"]) {
      for (const percent of [50, 90, 99]) setText(byId(`${name}-${percent}`), formatSeconds(model.times[name].percentile(percent / 100)));
    }
  }

  showPrefix(model) {
    const { tokens, lookups } = model;
    setText(byId("prefix-rate"), formatPercent(tokens.prompt ? tokens.cached / tokens.prompt : 0));
    setText(byId("prefix-status"), `${formatCount(tokens.cached)} of ${formatCount(tokens.prompt)} prompt tokens`);
    const misses = Object.entries(lookups).sort((a, b) => b[1] - a[1]);
    byId("prefix-misses").replaceChildren(...misses.map(([reason, count]) =>
      element("li", {}, element("b", { class: "number" }, formatCount(count)), missWords(reason))));
    byId("drafts").hidden = !tokens.proposed;
    if (tokens.proposed) setText(byId("drafts-rate"), `${formatPercent(tokens.accepted / tokens.proposed)} of ${formatCount(tokens.proposed)} drafts accepted`);
  }

  showTenants(model) {
    const found = new Map();
    for (const request of model.requests.values()) {
      const name = model.tenantName(request);
      const row = found.get(name) || { running: 0, waiting: 0, tokens: 0 };
      row.running += request.state === "running";
      row.waiting += request.state === "waiting";
      row.tokens += request.outputs;
      found.set(name, row);
    }
    const rows = [...found].sort((a, b) => b[1].tokens - a[1].tokens).slice(0, SHOWN_ROWS);
    byId("tenants").hidden = rows.length < 2;
    fillRows(byId("tenant-rows"), rows, ([name, row]) => [name, String(row.running), String(row.waiting), formatCount(row.tokens)]);
  }

  // Completions of each class that met all their targets, and those that did not, since the server started.
  showClasses(metrics) {
    const found = new Map();
    for (const [name, count] of Object.entries(metrics)) {
      const [counter, service, target, result] = name.split(" ");
      if (counter !== "request_targets_total") continue;
      if (!found.has(service)) found.set(service, {});
      found.get(service)[`${target} ${result}`] = count;
    }
    const rows = [...found].sort();
    byId("classes").hidden = !rows.length;
    fillRows(byId("class-rows"), rows, ([service, counts]) => {
      const of = (target, result) => counts[`${target} ${result}`] || 0;
      const [good, late] = [of("all", "in_time"), of("all", "late")];
      const parts = ["ttft", "tpot", "e2e"].map((target) => formatCount(of(target, "late"))).join(", ");
      return [service, `${formatCount(good)} (${formatPercent(good / (good + late))})`, formatCount(late), parts];
    });
  }

  // Counters since the server started, as in /metrics.
  showTotals(model) {
    byId("totals").hidden = !model.service;
    if (!model.service) return;
    const { metrics } = model.service;
    this.showClasses(metrics);
    const of = (name) => metrics[name] || 0;
    const ended = Object.entries(metrics).filter(([name]) => name.startsWith("requests_total "));
    const refused = Object.entries(metrics).filter(([name]) => name.startsWith("requests_refused_total "));
    const rows = [
      ["Prompt tokens", of("prompt_tokens_total"), "total-prompt"],
      ["of them cached", of("prompt_tokens_cached_total"), "total-cached"],
      ["Output tokens", of("output_tokens_total"), "total-output"],
      ["Steps", of("steps_total"), "total-steps"],
      ["Preemptions", of("preemptions_total"), "total-preemptions"],
      ...ended.map(([name, count]) => [`Ended: ${wordsOf(name.split(" ")[1])}`, count, `total-ended-${name.split(" ")[1]}`]),
      ...refused.map(([name, count]) => [`Refused: ${name.split(" ")[1]}`, count, null]),
      ["Engine restarts", of("engine_restarts_total"), "total-restarts"],
    ];
    byId("total-rows").replaceChildren(...rows.flatMap(([name, value, id]) =>
      [element("dt", {}, name), element("dd", { id, class: "number", "data-value": value }, value.toLocaleString("en-US"))]));
  }
}

function fillRows(body, rows, cellsOf) {
  body.replaceChildren(...rows.map((row) => element("tr", {}, ...cellsOf(row).map((cell) => element("td", {}, cell)))));
}

// Rates over the last seconds that had steps.
function ratesOf(model) {
  const rates = { outputs: 0, budget: 0, padding: 0, busy: 0 };
  const since = model.now - RATE_SECONDS;
  let [outputs, tokens, limit, padding, seconds, oldest] = [0, 0, 0, 0, 0, model.now];
  for (let index = model.steps.length - 1; index >= 0 && model.steps[index].time >= since; index--) {
    const step = model.steps[index];
    outputs += step.outputs;
    tokens += step.decode + step.prefill;
    padding += step.padding;
    limit += step.limit;
    seconds += step.seconds;
    oldest = step.time - step.seconds;
  }
  const span = Math.max(model.now - oldest, 1e-3);
  if (tokens) Object.assign(rates, { outputs: outputs / span, budget: tokens / limit, padding: padding / (tokens + padding), busy: Math.min(1, seconds / span) });
  return rates;
}
