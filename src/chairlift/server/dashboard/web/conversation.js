// A conversation with the model: its messages and settings, and what is sent and received. Draws nothing.

const STORED_AS = "chairlift-chat";
const ROLES = ["user", "assistant", "tool"];
const COMPLETION_TOKENS = 256; // the API's own limit for completions is 16
export const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
export const USUAL = { temperature: 1, top_p: 1, top_k: "off", min_p: 0, repetition_penalty: 1, seed: "random" };

export class Conversation {
  constructor(storage) {
    this.storage = storage;
    this.messages = []; // {role, content}; of the assistant also {reasoning, calls, id, problem, isStopped, usage, ...}
    this.settings = {}; // system, tools, reasoning and numbers, as they were entered
    this.restore();
  }

  get last() {
    return this.messages.at(-1) || null;
  }

  restore() {
    try {
      const { messages, settings } = JSON.parse(this.storage().getItem(STORED_AS));
      this.messages = messages.filter((each) => ROLES.includes(each.role) && typeof each.content === "string");
      for (const each of this.messages) if (each.role === "assistant") each.isStopped ||= !each.finish && !each.problem;
      this.settings = { ...settings };
    } catch {
      // nothing is stored, or there is no storage
    }
  }

  save() {
    try {
      this.storage().setItem(STORED_AS, JSON.stringify({ messages: this.messages, settings: this.settings }));
    } catch {
      // without storage, or if it is full, the conversation lasts as long as the page
    }
  }

  clear() {
    this.messages = [];
    this.save();
  }

  // Drop what follows the last message of the user, which is answered again.
  rewind() {
    const index = this.messages.findLastIndex((each) => each.role !== "assistant");
    this.messages.length = index + 1;
  }

  // The path and the body of the request for the message after these. Throws if a setting is not valid.
  request(hello, messages) {
    const body = { model: hello.model, stream: true, stream_options: { include_usage: true }, ...this.sampling() };
    if (!hello.has_chat) return ["v1/completions", { max_tokens: COMPLETION_TOKENS, ...body, prompt: messages.at(-1).content }];
    const { system, tools, reasoning } = this.settings;
    body.messages = [...(system ? [{ role: "system", content: system }] : []), ...wireMessages(messages)];
    if (tools) body.tools = toolsOf(tools);
    if (reasoning) body.reasoning_effort = reasoning;
    return ["v1/chat/completions", body];
  }

  sampling() {
    const entered = NUMBERS.filter((name) => this.settings[name]);
    return Object.fromEntries(entered.map((name) => [name, Number(this.settings[name])]));
  }
}

// An answer that failed before it had content is left out, and two messages of the user in a row are one.
function wireMessages(messages) {
  const sent = [];
  for (const message of messages) {
    if (message.role === "assistant" && !message.content && !(message.calls || []).length) continue;
    const wire = wireMessage(message);
    if (wire.role === "user" && sent.at(-1)?.role === "user") sent.at(-1).content += `\n\n${wire.content}`;
    else sent.push(wire);
  }
  return sent;
}

function wireMessage({ role, content, calls, callId }) {
  if (role === "tool") return { role, content, tool_call_id: callId };
  if (!calls || !calls.length) return { role, content };
  const called = calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
  return { role, content: content || null, tool_calls: called };
}

function toolsOf(text) {
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`The tools are not valid JSON: ${error.message}`);
  }
  if (!Array.isArray(tools)) throw new Error("The tools must be a list, in square brackets");
  return tools.map((tool) => (tool.function ? tool : { type: "function", function: tool }));
}

// Add an event of the stream to an answer.
export function takeEvent(answer, event) {
  if (event.id) answer.id = event.id;
  if (event.usage) answer.usage = event.usage;
  const [choice] = event.choices || [];
  if (!choice) return;
  const delta = choice.delta || { content: choice.text };
  answer.content += delta.content || "";
  answer.reasoning = (answer.reasoning || "") + (delta.reasoning_content || "");
  for (const { index, id, function: called } of delta.tool_calls || []) {
    answer.calls ||= [];
    const call = (answer.calls[index] ||= { id: "", name: "", arguments: "" });
    call.id += id || "";
    call.name += called?.name || "";
    call.arguments += called?.arguments || "";
  }
  if (choice.finish_reason) answer.finish = choice.finish_reason;
}

// Read the events of a response.
export async function readEvents(response, onEvent) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ") || event === "data: [DONE]") continue;
      const data = JSON.parse(event.slice(6));
      if (data.error) throw new Error(data.error.message);
      onEvent(data);
    }
  }
}

// Send JSON, and return the response unless it is an error.
export async function sendJSON(connection, path, body, signal = null) {
  const headers = { "Content-Type": "application/json" };
  let response;
  try {
    response = await connection.fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error("The server cannot be reached.");
  }
  if (!response.ok) throw new Error(await problemOf(response));
  return response;
}

async function problemOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `The server answers with status ${response.status}.`;
  }
}
