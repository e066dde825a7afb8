// What shows how the scheduler works: bursts of many requests, and a switch for the policy.

import { sendJSON } from "./conversation.js";
import { byId, setText } from "./format.js";

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
    for (const button of document.querySelectorAll("[data-burst]")) {
      button.addEventListener("click", () => this.burst(button.dataset.burst));
    }
    byId("policies").addEventListener("change", (event) => this.switchPolicy(event.target.value));
  }

  refresh() {}

  update() {
    const { model, isLive } = this.app;
    byId("playground").classList.toggle("off", !isLive);
    this.showPolicies(model.hello.policies || (model.policy ? [model.policy] : []));
    for (const control of byId("playground").querySelectorAll("button, input")) {
      control.disabled = !isLive || (control.name === "policy" && !model.hello.policy_switch);
    }
    setText(byId("policy-status"), policyWords(model));
    if (!this.isSwitching) for (const radio of document.querySelectorAll("[name=policy]")) radio.checked = radio.value === model.policy;
  }

  // The policies of the server, those of its plugins included; a recording has only its own.
  showPolicies(names) {
    if (this.shown === names.join()) return;
    this.shown = names.join();
    for (const label of byId("policies").querySelectorAll("label")) label.remove();
    for (const name of names) {
      const radio = Object.assign(document.createElement("input"), { type: "radio", name: "policy", value: name });
      const words = Object.assign(document.createElement("span"), { textContent: name });
      const label = document.createElement("label");
      label.append(radio, words);
      byId("policies").append(label);
    }
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
        const response = await sendJSON(this.app.connection, "v1/completions", body);
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
      await sendJSON(this.app.connection, "dashboard/policy", policy === "static" ? { policy, max_delay_ms: 1000 } : { policy });
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
