// Formats numbers and names.

export function formatCount(value) {
  if (value >= 1e6) return (value / 1e6).toFixed(value >= 1e7 ? 0 : 1) + "M";
  if (value >= 1e4) return (value / 1e3).toFixed(value >= 1e5 ? 0 : 1) + "k";
  return Math.round(value).toLocaleString("en-US");
}

export function formatSeconds(seconds) {
  if (seconds === null || !Number.isFinite(seconds)) return "–";
  if (seconds >= 100) return seconds.toFixed(0) + " s";
  if (seconds >= 1) return seconds.toFixed(seconds >= 10 ? 1 : 2) + " s";
  const ms = seconds * 1000;
  if (ms >= 100) return ms.toFixed(0) + " ms";
  return ms.toFixed(ms >= 10 ? 1 : 2) + " ms";
}

export function formatPercent(share) {
  if (share === null || !Number.isFinite(share)) return "–";
  const percent = share * 100;
  return (percent >= 10 || percent === 0 ? percent.toFixed(0) : percent.toFixed(1)) + "%";
}

// Drop the prefix that all ids share, and keep the beginning of the rest.
export function shortId(id) {
  const [, random, rest] = /^(?:chatcmpl|cmpl|resp)[-_]([0-9a-f]{6})[0-9a-f]*(.*)$/.exec(id) || [null, id.slice(0, 10), ""];
  return random + rest.replace(/^-0(?=$|#)/, "");
}

export function wordsOf(name) {
  return name.replaceAll("_", " ");
}

const WAIT_WORDS = {
  next_step: "not offered a slot yet",
  slots: "all slots are taken",
  isolation: "its tenant has many requests",
  late: "it can no longer be in time; others can",
  target: "one more would break the latency target",
  budget: "the step's token budget is used up",
  memory: "not enough free KV blocks",
  preemption: "memory ran out in this step",
  turn: "an overtaken request goes first",
  batch_filling: "the batch is not full yet",
  batch_running: "a batch is running",
  sibling: "its sibling computes their prompt",
  grammar: "its grammar is being compiled",
  adapter: "its adapter is being loaded",
  adapter_memory: "its adapter has no room yet",
  images: "its next image is being encoded",
  prefix: "another computes the same prefix",
  loading: "its prefix is being loaded from a tier",
};

export function waitWords(reason) {
  return WAIT_WORDS[reason] || wordsOf(reason);
}

const MISS_WORDS = {
  disabled: "prefix caching is off",
  too_short: "prompt shorter than a block",
  whole_prompt: "the whole prompt is scored or pooled",
  never_seen: "the rest is new",
  evicted: "computed before, but evicted",
  no_state: "no state kept at a later block",
  all_found: "all of it was cached",
};

export function missWords(reason) {
  return MISS_WORDS[reason] || wordsOf(reason);
}

// An element with attributes and children; text is never parsed as markup.
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function byId(id) {
  return document.getElementById(id);
}

// Setting unchanged text would still cost a layout.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
