// The chat: a conversation with the model, beside the picture of its requests.

import { Conversation, NUMBERS, USUAL, readEvents, sendJSON, takeEvent } from "./conversation.js";
import { byId, element, formatSeconds, setText, shortId, wordsOf } from "./format.js";
import { showMarkdown } from "./markdown.js";

const RENDER_MS = 60; // between renderings of an answer that grows, or more if they take long
const HELP = "Enter sends, Shift+Enter begins a line, Esc stops.";
const ANNOUNCED = 600; // characters of an answer that are read out

export class ChatPanel {
  // `app` has the connection, whether it is live, the server's `hello`, and finds and opens requests of the lift.
  constructor(app) {
    this.app = app;
    this.talk = new Conversation(() => sessionStorage);
    this.views = []; // of the messages, in their order
    this.isEditing = false;
    this.input = byId("chat-input");
    this.log = byId("chat-log");
    this.makeSettings();
    this.listen();
    this.showAll();
  }

  listen() {
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send(this.input.value);
    });
    this.input.addEventListener("input", () => this.fitInput());
    this.input.addEventListener("keydown", (event) => this.onKey(event));
    byId("chat").addEventListener("keydown", (event) => event.key === "Escape" && this.escape());
    byId("chat").addEventListener("click", (event) => event.target.dataset.copy !== undefined && copyText(event.target, event.target.dataset.copy));
    byId("chat-stop").addEventListener("click", () => this.stop());
    byId("chat-new").addEventListener("click", () => this.startAnew());
    byId("chat-options").addEventListener("click", () => this.showSettings(byId("chat-settings").hidden));
    byId("chat-own").addEventListener("click", () => this.ownRequest && this.app.openStory(this.ownRequest));
    addEventListener("pagehide", () => this.talk.save());
  }

  onKey(event) {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      this.send(this.input.value);
    } else if (event.key === "ArrowUp" && !this.input.value && this.talk.last) {
      event.preventDefault();
      this.edit();
    }
  }

  escape() {
    if (this.abort) this.stop();
    else if (this.isEditing) this.stopEditing("");
  }

  refresh() {}

  // ---- what may be done now -------------------------------------------------------------------------------------------

  update() {
    const { hello, isLive } = this.app;
    const hasModel = Boolean(isLive && hello.model);
    byId("chat").classList.toggle("off", !hasModel);
    for (const control of byId("chat").querySelectorAll("button, input, textarea, select")) control.disabled = !hasModel && !control.dataset.copy;
    if (hasModel && this.hello !== hello) this.greet(hello);
    const id = this.talk.messages.findLast((each) => each.id)?.id;
    this.ownRequest = id ? this.app.findRequest(ownId(id)) : null;
    byId("chat-own").hidden = !this.ownRequest || !this.app.openStory;
    if (this.ownRequest) this.showOwn(this.ownRequest);
    for (const view of this.views) view.story.hidden = !view.message.id || !this.app.openStory || !this.app.findRequest(ownId(view.message.id));
  }

  // Once the server has said what it serves.
  greet(hello) {
    this.hello = hello;
    byId("chat").classList.toggle("completes", !hello.has_chat);
    byId("chat-reasoning").hidden = !hello.has_reasoning || !hello.has_chat;
    setText(byId("chat-title"), hello.has_chat ? "Chat" : "Completion");
    setText(byId("chat-model"), hello.has_chat ? "" : "This model has no chat template: it continues a text.");
    this.input.placeholder = hello.has_chat ? "Say something" : "A text to continue";
    this.log.dataset.empty = hello.has_chat ? "Talk to the model: your own requests are framed on the lift." : "Type the beginning of a text: your own requests are framed on the lift.";
    const recommended = hello.sampling || {};
    for (const name of NUMBERS) byId(`set-${name}`).placeholder = String(recommended[name] ?? (name === "max_tokens" ? (hello.has_chat ? "no limit" : "256") : USUAL[name]));
    const names = Object.entries(recommended).map(([name, value]) => `${wordsOf(name)} ${value}`);
    setText(byId("chat-advice"), names.length ? `An empty field is what the model recommends: ${names.join(", ")}.` : "The model recommends nothing, so an empty field is the usual value.");
    this.showAll();
    this.showHelp();
  }

  showHelp() {
    setText(byId("chat-help"), this.isEditing ? "You edit your last message; the answer to it is replaced. Esc keeps it." : HELP);
  }

  // A picture of the last request: cached, computed and generated tokens.
  showOwn(request) {
    const most = request.prompt + Math.max(request.outputs, 1);
    byId("own-cached").style.width = `${(100 * Math.min(request.cached, request.prompt)) / most}%`;
    byId("own-prompt").style.width = `${(100 * Math.max(0, request.prompt - request.cached)) / most}%`;
    byId("own-output").style.width = `${(100 * request.outputs) / most}%`;
    const state = request.end ? request.end.reason : request.state === "running" ? `slot ${request.slot + 1}` : request.state;
    setText(byId("own-status"), `${shortId(request.id)}: ${request.cached} cached + ${request.prompt - request.cached} prompt + ${request.outputs} new, ${state}`);
  }

  // ---- settings -------------------------------------------------------------------------------------------------------

  makeSettings() {
    byId("chat-numbers").append(...NUMBERS.map((name) =>
      element("label", {}, element("span", {}, wordsOf(name)), element("input", { id: `set-${name}`, "data-setting": name, type: "number", step: "any", inputmode: "decimal" }))));
    for (const control of byId("chat-settings").querySelectorAll("[data-setting]")) {
      control.value = this.talk.settings[control.dataset.setting] || "";
      control.addEventListener("input", () => {
        this.talk.settings[control.dataset.setting] = control.value.trim();
        this.talk.save();
      });
    }
    byId("chat-settings").addEventListener("submit", (event) => event.preventDefault());
    byId("chat-reset").addEventListener("click", () => {
      this.talk.settings = {};
      this.talk.save();
      for (const control of byId("chat-settings").querySelectorAll("[data-setting]")) control.value = "";
    });
  }

  showSettings(isOpen) {
    byId("chat-settings").hidden = !isOpen;
    byId("chat-options").setAttribute("aria-expanded", String(isOpen));
  }

  // ---- actions --------------------------------------------------------------------------------------------------------

  send(text) {
    if (!text.trim() || this.abort || !this.hello) return;
    if (this.isEditing) this.dropLast();
    this.stopEditing("");
    this.talk.messages.push({ role: "user", content: this.hello.has_chat ? text.trim() : text });
    this.answer();
  }

  dropLast() {
    const index = this.talk.messages.findLastIndex((each) => each.role === "user");
    this.talk.messages.length = Math.max(0, index);
  }

  edit() {
    const last = this.talk.messages.findLast((each) => each.role === "user");
    if (!last || this.abort) return;
    this.isEditing = true;
    this.input.value = last.content;
    this.fitInput();
    this.showHelp();
    this.input.focus();
  }

  stopEditing(text) {
    this.isEditing = false;
    this.input.value = text;
    this.fitInput();
    this.showHelp();
  }

  retry() {
    if (this.abort) return;
    this.talk.rewind();
    this.answer();
    this.input.focus();
  }

  // A text goes on where the model stopped.
  goOn() {
    const [prompt, answer] = this.talk.messages.slice(-2);
    this.send(prompt.content + answer.content);
  }

  giveResults(results) {
    if (this.abort) return;
    this.talk.messages.push(...results);
    this.answer();
    this.input.focus();
  }

  stop() {
    if (this.abort) this.abort.abort();
  }

  startAnew() {
    this.stop();
    this.talk.clear();
    this.stopEditing("");
    this.showAll();
    this.input.focus();
  }

  async answer() {
    const { talk } = this;
    const answer = { role: "assistant", content: "", began: Date.now() };
    this.abort = new AbortController();
    this.showBusy(true);
    const asked = [...talk.messages];
    talk.messages.push(answer);
    this.showAll();
    try {
      const [path, body] = talk.request(this.hello, asked);
      const response = await sendJSON(this.app.connection, path, body, this.abort.signal);
      await readEvents(response, (event) => this.takeIn(answer, event));
      if (!answer.finish) answer.problem = "The stream ended before the answer did.";
    } catch (error) {
      if (error.name === "AbortError") answer.isStopped = true;
      else answer.problem = error.message;
    }
    answer.seconds = (Date.now() - answer.began) / 1000;
    this.abort = null;
    this.showBusy(false);
    talk.save();
    this.showAll();
    this.announce(answer);
  }

  takeIn(answer, event) {
    takeEvent(answer, event);
    if (answer.id) this.app.own.add(ownId(answer.id));
    if (!answer.firstSeconds && (answer.content || answer.reasoning)) answer.firstSeconds = (Date.now() - answer.began) / 1000;
    this.renderSoon();
  }

  showBusy(isBusy) {
    byId("chat-stop").hidden = !isBusy;
    byId("chat-send").hidden = isBusy;
    this.log.setAttribute("aria-busy", String(isBusy));
    setText(byId("chat-status"), isBusy ? "The model answers." : "");
  }

  announce({ content, problem, isStopped }) {
    const text = problem ? `It failed: ${problem}` : content.slice(0, ANNOUNCED) + (isStopped ? " Stopped." : "");
    setText(byId("chat-status"), text || "The answer is empty.");
  }

  // ---- display --------------------------------------------------------------------------------------------------------

  renderSoon() {
    if (this.rendering) return;
    this.rendering = setTimeout(() => {
      const began = performance.now();
      this.rendering = null;
      this.keepAtEnd(() => this.views.at(-1)?.show());
      this.renderMs = performance.now() - began;
    }, Math.max(RENDER_MS, 4 * (this.renderMs || 0)));
  }

  showAll() {
    clearTimeout(this.rendering);
    this.rendering = null;
    const { messages } = this.talk;
    for (const { id } of messages) if (id) this.app.own.add(ownId(id));
    this.keepAtEnd(() => {
      this.views = messages.map((message) => this.views.find((view) => view.message === message) || new MessageView(this, message));
      this.log.replaceChildren(...this.views.map((view) => view.node));
      for (const view of this.views) view.show();
    });
    this.app.update();
  }

  // Scroll on with a growing answer, unless the reader has scrolled back.
  keepAtEnd(change) {
    const { log } = this;
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    change();
    if (isAtEnd || this.talk.last?.role === "user") log.scrollTop = log.scrollHeight;
  }

  fitInput() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(160, this.input.scrollHeight + 2)}px`;
  }
}

// One message, with what can be done to it.
class MessageView {
  constructor(panel, message) {
    Object.assign(this, { panel, message });
    const action = (label, act) => element("button", { type: "button", class: "small", onclick: act }, label);
    const isUser = message.role === "user";
    this.body = element("div", { class: "text" });
    this.reasoning = element("pre", { tabindex: "0" });
    this.thoughts = element("details", { class: "aside", hidden: true }, element("summary", {}, "Reasoning"), this.reasoning);
    this.calls = element("div", { class: "calls" });
    this.problem = element("p", { class: "problem", hidden: true });
    this.facts = element("span", { class: "number" });
    this.copy = action("Copy", () => copyText(this.copy, message.content));
    this.edit = isUser ? action("Edit", () => panel.edit()) : null;
    this.retry = isUser ? null : action("Retry", () => panel.retry());
    this.goOn = isUser ? null : action("Continue", () => panel.goOn());
    this.story = action("Story", () => panel.app.openStory(panel.app.findRequest(ownId(message.id))));
    const foot = element("footer", {}, this.facts, this.edit, this.retry, this.goOn, this.copy, this.story);
    const names = { user: "You", assistant: "The model", tool: `Result of ${message.name}` };
    this.node = element("article", { class: `message ${message.role}`, "aria-label": names[message.role] }, this.thoughts, this.body, this.calls, this.problem, foot);
  }

  show() {
    const { message, panel } = this;
    const isLast = panel.talk.last === message;
    const isBusy = isLast && Boolean(panel.abort) && message.role === "assistant";
    const isText = message.role !== "assistant" || (panel.hello && !panel.hello.has_chat);
    if (isText) setText(this.body, message.content);
    else showMarkdown(this.body, message.content);
    this.node.classList.toggle("plain", Boolean(isText));
    this.node.classList.toggle("busy", isBusy && !message.content);
    this.showThoughts(isBusy);
    this.showCalls(isLast && !panel.abort);
    this.problem.hidden = !message.problem;
    setText(this.problem, message.problem || "");
    setText(this.facts, isBusy ? "" : factsOfAnswer(message));
    const canChange = !panel.abort && isLast;
    if (this.edit) this.edit.hidden = panel.abort || panel.talk.messages.findLast((each) => each.role === "user") !== message;
    if (this.retry) this.retry.hidden = !canChange;
    if (this.goOn) this.goOn.hidden = !canChange || !isText || !message.content;
    this.copy.hidden = isBusy || !message.content;
    this.story.hidden = true; // until the request is known to be on the lift
  }

  // Open while the model only reasons, unless the reader has chosen.
  showThoughts(isBusy) {
    const { reasoning, content } = this.message;
    this.thoughts.hidden = !reasoning;
    setText(this.reasoning, (reasoning || "").trim());
    const isOpen = Boolean(isBusy && !content);
    if (this.wasOpen !== isOpen) this.thoughts.open = isOpen;
    this.wasOpen = isOpen;
  }

  showCalls(wantsResults) {
    const { calls } = this.message;
    if (!calls) return;
    const nodes = calls.map((call) => element("details", { class: "aside", open: true },
      element("summary", {}, "Calls ", element("b", {}, call.name)), element("pre", { tabindex: "0" }, prettyJSON(call.arguments))));
    if (wantsResults && this.resultsForm) return; // keep what is being typed
    this.resultsForm = wantsResults ? this.makeResultsForm(calls) : null;
    this.calls.replaceChildren(...nodes, ...(this.resultsForm ? [this.resultsForm] : []));
  }

  makeResultsForm(calls) {
    const inputs = calls.map((call) => element("textarea", { rows: "1", "aria-label": `Result of ${call.name}`, placeholder: `Result of ${call.name}` }));
    const onsubmit = (event) => {
      event.preventDefault();
      this.panel.giveResults(calls.map(({ id, name }, index) => ({ role: "tool", callId: id, name, content: inputs[index].value })));
    };
    return element("form", { class: "results", onsubmit }, ...inputs, element("button", { type: "submit" }, calls.length > 1 ? "Send the results" : "Send the result"));
  }
}

// The lift's name of the request with this answer.
function ownId(id) {
  return `${id}-0`;
}

function factsOfAnswer({ usage, seconds, firstSeconds, finish, isStopped }) {
  if (seconds === undefined) return isStopped ? "stopped" : "";
  const facts = [];
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    facts.push(`${usage.prompt_tokens} in${cached ? ` (${cached} cached)` : ""}`, `${usage.completion_tokens} out`);
    const rest = seconds - (firstSeconds || 0);
    if (usage.completion_tokens > 1 && rest > 0) facts.push(`${((usage.completion_tokens - 1) / rest).toFixed(1)} tok/s`);
  }
  if (firstSeconds) facts.push(`first after ${formatSeconds(firstSeconds)}`);
  if (isStopped) facts.push("stopped");
  else if (finish && finish !== "stop") facts.push(wordsOf(finish === "length" ? "cut off at the limit" : finish));
  return facts.join(" · ");
}

function prettyJSON(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // not whole yet, or no JSON
  }
}

// The clipboard's own interface is missing on pages that came over http from another machine.
async function copyText(button, text) {
  let isCopied = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const box = element("textarea", { class: "hidden" });
    box.value = text;
    document.body.append(box);
    box.select();
    isCopied = document.execCommand("copy");
    box.remove();
    button.focus();
  }
  const label = button.dataset.label || button.textContent;
  button.dataset.label = label;
  setText(button, isCopied ? "Copied" : "Cannot copy");
  setTimeout(() => setText(button, label), 1500);
}
