// A chat with the model beside a picture of its request, and bursts of many requests.

import { byId, element, setText, shortId } from "./format.js";

const WORDS = ("a chairlift never stops for boarding and neither does the engine finished requests step off waiting ones " +
  "get on at every iteration many sequences are concatenated without padding into one ragged batch").split(" ");
// A browser opens at most six connections to a server, so a burst is a few requests with many prompts each.
const BURSTS = {
  mixed: { prompts: [6, 6, 6, 6], words: (index) => 6 + ((index * 37) % 60), outputs: [10, 24, 48, 80] },
  shared: { prompts: [8, 8, 8], shared: 70, words: () => 6, outputs: [16, 28, 40] },
  long: { prompts: [5, 1, 5], words: (index) => (index === 5 ? 4000 : 6), outputs: [72, 24, 48] },
};

export class Playground {
  constructor(app) {
    this.app = app;
    this.messages = [];
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.say(byId("chat-input").value.trim());
    });
    byId("chat-stop").addEventListener("click", () => this.abort && this.abort.abort());
    byId("chat-own").addEventListener("click", () => this.ownRequest && this.app.openStory(this.ownRequest));
    for (const button of document.querySelectorAll("[data-burst]")) {
      button.addEventListener("click", () => this.burst(button.dataset.burst));
    }
    for (const radio of document.querySelectorAll("[name=policy]")) {
      radio.addEventListener("change", () => this.switchPolicy(radio.value));
    }
  }

  refresh() {}

  update() {
    const { model, isLive } = this.app;
    byId("playground").classList.toggle("off", !isLive);
    for (const control of byId("playground").querySelectorAll("button, input, textarea")) {
      control.disabled = !isLive || (control.name === "policy" && !model.hello.policy_switch);
    }
    setText(byId("policy-status"), policyWords(model));
    if (!this.isSwitching) for (const radio of document.querySelectorAll("[name=policy]")) radio.checked = radio.value === model.policy;
    this.ownRequest = this.ownId ? model.requests.get(this.ownId) || this.ownRequest : null;
    byId("chat-own").hidden = !this.ownRequest;
    if (this.ownRequest) this.showOwn(this.ownRequest);
  }

  // A picture of the chat's own request: cached, computed and generated tokens.
  showOwn(request) {
    const most = request.prompt + Math.max(request.outputs, 1);
    byId("own-cached").style.width = `${(100 * Math.min(request.cached, request.prompt)) / most}%`;
    byId("own-prompt").style.width = `${(100 * Math.max(0, request.prompt - request.cached)) / most}%`;
    byId("own-output").style.width = `${(100 * request.outputs) / most}%`;
    const state = request.end ? request.end.reason : request.state === "running" ? `slot ${request.slot + 1}` : request.state;
    setText(byId("own-status"), `${shortId(request.id)}: ${request.cached} cached + ${request.prompt - request.cached} prompt + ${request.outputs} new, ${state}`);
  }

  // ---- chat ---------------------------------------------------------------------------------------------------------

  async say(text) {
    if (!text || this.abort) return;
    byId("chat-input").value = "";
    this.messages.push({ role: "user", content: text });
    this.addBubble("user", text);
    const bubble = this.addBubble("assistant", "");
    this.abort = new AbortController();
    byId("chat-stop").hidden = false;
    let answer = "";
    try {
      answer = await this.stream(bubble);
    } catch (error) {
      if (error.name === "AbortError") bubble.append(element("em", {}, " (stopped)"));
      else bubble.append(element("em", { class: "problem" }, error.message));
    }
    this.messages.push({ role: "assistant", content: answer || bubble.textContent });
    this.abort = null;
    byId("chat-stop").hidden = true;
  }

  async stream(bubble) {
    const hasChat = this.app.model.hello.has_chat;
    const what = hasChat ? { messages: this.messages } : { prompt: this.messages.at(-1).content };
    const body = { ...what, model: this.app.model.hello.model, stream: true, max_tokens: 200 };
    let answer = "";
    await this.post(hasChat ? "v1/chat/completions" : "v1/completions", body, this.abort.signal, (event) => {
      if (event.id && this.ownAnswer !== event.id) {
        this.ownAnswer = event.id;
        this.ownId = `${event.id}-0`;
      }
      const [choice] = event.choices || [];
      const piece = choice ? (hasChat ? choice.delta.content : choice.text) : "";
      if (piece) {
        answer += piece;
        bubble.textContent = answer;
        byId("chat-log").scrollTop = byId("chat-log").scrollHeight;
      }
    });
    return answer;
  }

  addBubble(role, text) {
    const bubble = element("p", { class: `bubble ${role}` }, text);
    byId("chat-log").append(bubble);
    byId("chat-log").scrollTop = byId("chat-log").scrollHeight;
    return bubble;
  }

  // Sends JSON and yields the events of the response.
  async post(path, body, signal, onEvent) {
    const response = await this.send(path, body, signal);
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

  async send(path, body, signal = null) {
    const headers = { "Content-Type": "application/json" };
    const response = await this.app.connection.fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
    if (!response.ok) throw new Error((await response.json()).error.message);
    return response;
  }

  // ---- bursts ------------------------------------------------------------------------------------------------------

  async burst(kind) {
    const plan = BURSTS[kind];
    const all = plan.prompts.reduce((sum, count) => sum + count, 0);
    // A word is one or two tokens on average; even at four tokens per word the prompts fit, with room for others.
    const { hello, blocks } = this.app.model;
    const mostTokens = Math.min(hello.max_model_len || 256, (blocks.count * blocks.size) / 2) - Math.max(...plan.outputs);
    const mostWords = Math.max(8, Math.floor(mostTokens / 6));
    const shared = plan.shared ? someWords(Math.min(plan.shared, Math.floor(mostWords * 0.75))) + " " : "";
    let [answered, problem, index] = [0, "", 0];
    const show = () => setText(byId("burst-status"), `${answered} of ${all} answered${problem && `. ${problem}`}`);
    show();
    await Promise.all(plan.prompts.map(async (count, group) => {
      const prompts = Array.from({ length: count }, () => shared + someWords(Math.min(plan.words(index++), mostWords - (shared ? plan.shared : 0))));
      const body = { model: this.app.model.hello.model, prompt: prompts, max_tokens: plan.outputs[group], ignore_eos: true, user: `guest ${group + 1}` };
      try {
        const response = await this.send("v1/completions", body);
        await response.text();
        answered += count;
      } catch (error) {
        problem = error.message;
      }
      show();
    }));
  }

  async switchPolicy(policy) {
    this.isSwitching = true;
    try {
      await this.send("dashboard/policy", policy === "static" ? { policy, max_delay_ms: 1000 } : { policy });
    } catch (error) {
      setText(byId("burst-status"), error.message);
    }
    setTimeout(() => (this.isSwitching = false), 1000); // by then a frame shows the policy
  }
}

function someWords(count) {
  return Array.from({ length: Math.max(1, count) }, () => WORDS[Math.floor(Math.random() * WORDS.length)]).join(" ");
}

function policyWords(model) {
  const words = {
    continuous: "A slot is taken again in the very next step.",
    static: "A batch begins together; its empty slots are bubbles until the last one ends.",
    dynamic: "As static, but a batch does not wait long to be filled.",
  };
  const known = words[model.policy] || "";
  return model.hello.policy_switch === false ? `${known} To change it, start the server with --policy-switch.` : known;
}
