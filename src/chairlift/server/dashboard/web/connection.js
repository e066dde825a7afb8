// The live stream. Uses fetch instead of EventSource, which cannot send an API key.

const SESSION_KEY = "chairlift-api-key";
const LONGEST_PAUSE = 5000;

export class Connection {
  constructor(onFrame, onState) {
    this.onFrame = onFrame; // called with each frame and its text
    this.onState = onState; // live, connecting, key (needed), refused (with a reason), off
    this.key = readKey();
    this.isOn = false;
  }

  setKey(key) {
    this.key = key;
    keepKey(key);
    this.restart();
  }

  get headers() {
    return this.key ? { Authorization: `Bearer ${this.key}` } : {};
  }

  fetch(path, options = {}) {
    return fetch(path, { ...options, headers: { ...this.headers, ...options.headers } });
  }

  start() {
    this.isOn = true;
    this.run();
  }

  stop() {
    this.isOn = false;
    if (this.abort) this.abort.abort();
    this.onState("off");
  }

  // Start a new stream, which begins with a keyframe.
  restart() {
    if (this.abort) this.abort.abort();
    if (!this.isRunning && this.isOn) this.run();
  }

  async run() {
    this.isRunning = true;
    for (let pause = 250; this.isOn; pause = Math.min(LONGEST_PAUSE, pause * 2)) {
      this.onState("connecting");
      this.abort = new AbortController();
      try {
        const response = await this.fetch("dashboard/stream", { signal: this.abort.signal, cache: "no-store" });
        if (response.status === 401) {
          this.onState("key");
          break; // until there is a key
        }
        if (response.ok) {
          await this.read(response.body.getReader());
          pause = 250;
        } else {
          this.onState("refused", await reasonOf(response)); // then try again
        }
      } catch {
        if (this.abort.signal.aborted) {
          pause = 100;
        }
      }
      if (this.isOn) await new Promise((resolve) => setTimeout(resolve, pause));
    }
    this.isRunning = false;
  }

  async read(reader) {
    const decoder = new TextDecoder();
    let rest = "";
    for (let isFirst = true; ; isFirst = false) {
      const { done, value } = await reader.read();
      if (done) return;
      if (isFirst) this.onState("live");
      const events = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        if (event.startsWith("data: ")) this.onFrame(JSON.parse(event.slice(6)), event.slice(6));
      }
    }
  }
}

async function reasonOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answers with status ${response.status}`;
  }
}

function readKey() {
  try {
    return sessionStorage.getItem(SESSION_KEY) || "";
  } catch {
    return "";
  }
}

function keepKey(key) {
  try {
    sessionStorage.setItem(SESSION_KEY, key);
  } catch {
    // without session storage, the key must be entered again
  }
}
