// The page: a model, fed by the server or a file, and the panels that show it.

import { BlocksPanel } from "./blocks_panel.js";
import { ChatPanel } from "./chat.js";
import { Connection } from "./connection.js";
import { byId, setText } from "./format.js";
import { LiftPanel } from "./lift.js";
import { Model } from "./model.js";
import { Playground } from "./playground.js";
import { RunBuffer, base64OfBlob, bytesOfBase64, download, readRun } from "./recording.js";
import { Replay } from "./replay.js";
import { ServicePanel } from "./service_panel.js";
import { StepPanel } from "./step_panel.js";
import { StoryPanel } from "./story.js";
import { startTheme } from "./theme.js";

const UPDATE_MS = 100; // faster changing numbers cannot be read

class App {
  constructor() {
    this.model = new Model();
    this.selected = null; // the request whose story is open
    this.own = new Set(); // the ids of the chat's requests
    this.cursor = null; // the selected step; null: the last one
    this.isLive = false;
    this.isStale = true;
    this.updatedAt = 0;
    this.frameTimes = [];
    this.run = new RunBuffer(() => this.connection.restart());
    this.connection = new Connection((frame, text) => this.takeIn(frame, text), (state, reason) => this.showState(state, reason));
    this.replay = new Replay(this);
    this.lift = new LiftPanel(this);
    this.story = new StoryPanel(this);
    this.panels = [this.lift, new StepPanel(this), new BlocksPanel(this), new ServicePanel(this), new Playground(this), this.story];
    this.chat = new ChatPanel(this);
    this.panels.push(this.chat);
  }

  start() {
    startTheme(() => this.update());
    this.listen();
    requestAnimationFrame((now) => this.tick(now));
    const embedded = byId("recording").textContent.trim();
    if (embedded) this.openRun(bytesOfBase64(embedded), document.title);
    else if (location.protocol === "file:") this.showState("off");
    else this.goLive();
  }

  // ---- input ------------------------------------------------------------------------------------------------------

  takeIn(frame, text) {
    if (!this.isLive) return;
    this.run.push(frame, text);
    this.model.apply(frame);
    this.update();
  }

  goLive() {
    this.replay.close();
    this.model = new Model();
    this.forgetPlaces();
    this.isLive = location.protocol !== "file:";
    if (this.isLive) this.connection.start();
    this.update();
  }

  async openRun(bytes, name) {
    try {
      const frames = await readRun(bytes);
      this.isLive = false;
      this.connection.stop();
      this.replay.open(frames, name);
      this.showState("replay");
    } catch (error) {
      this.say(`${name}: ${error.message}`);
    }
  }

  forgetPlaces() {
    this.cursor = null;
    this.selected = null;
    byId("story").hidden = true;
    this.lift.view.isLive = true;
    this.lift.view.right = 0;
  }

  // ---- display ----------------------------------------------------------------------------------------------------

  update() {
    this.isStale = true;
  }

  tick(now) {
    requestAnimationFrame((next) => this.tick(next));
    this.frameTimes.push(now);
    if (this.frameTimes.length > 240) this.frameTimes.shift();
    this.replay.tick(now);
    if (this.isStale && now - this.updatedAt >= UPDATE_MS) {
      this.isStale = false;
      this.updatedAt = now;
      for (const panel of this.panels) panel.update();
      this.showHeader();
    }
    for (const panel of this.panels) panel.refresh();
  }

  showHeader() {
    const { hello, lost, service } = this.model;
    setText(byId("model-name"), hello.model || "");
    byId("lost").hidden = !lost;
    setText(byId("lost"), `${lost} frames lost: this page was too slow for them`);
    const faults = service && service.metrics.dashboard_faults_total;
    byId("faults").hidden = !faults;
    if (faults) setText(byId("faults"), faultWords(faults, service.recorder_off));
  }

  showState(state, reason = "") {
    const words = { live: "live", connecting: "connecting", key: "needs a key", refused: "not available", off: "no server", replay: "replay" };
    document.documentElement.dataset.state = state;
    setText(byId("state"), words[state]);
    byId("key-form").hidden = state !== "key";
    if (state !== "connecting") byId("refusal").hidden = state !== "refused"; // stays visible between attempts
    if (state === "refused") setText(byId("refusal"), `The server shows nothing to this page: ${reason}.`);
    if (state === "key") byId("key-input").focus();
    byId("save").disabled = byId("save-page").disabled = state !== "live";
  }

  setCursor(col) {
    this.cursor = col;
    this.update();
  }

  get hello() {
    return this.model.hello;
  }

  findRequest(id) {
    return this.model.requests.get(id) || null;
  }

  openStory(request) {
    this.story.open(request);
  }

  say(text) {
    setText(byId("message"), text);
    byId("message").hidden = !text;
    clearTimeout(this.messageTimer);
    this.messageTimer = setTimeout(() => (byId("message").hidden = true), 6000);
  }

  // ---- actions ----------------------------------------------------------------------------------------------------

  listen() {
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.connection.setKey(byId("key-input").value.trim());
    });
    byId("save").addEventListener("click", () => this.save());
    byId("save-page").addEventListener("click", () => this.savePage());
    byId("open").addEventListener("click", () => byId("open-file").click());
    byId("open-file").addEventListener("change", async (event) => {
      const [file] = event.target.files;
      if (file) await this.openRun(await file.arrayBuffer(), file.name);
      event.target.value = "";
    });
    document.addEventListener("dragover", (event) => event.preventDefault());
    document.addEventListener("drop", async (event) => {
      event.preventDefault();
      const [file] = event.dataTransfer.files;
      if (file) await this.openRun(await file.arrayBuffer(), file.name);
    });
  }

  async save() {
    if (this.run.isEmpty) return;
    download(await this.run.file(), `chairlift-${stamp()}.lift`);
  }

  // Save the page with the run embedded, which opens in any browser without a server.
  async savePage() {
    if (this.run.isEmpty) return;
    const page = await (await fetch("dashboard")).text();
    const data = await base64OfBlob(await this.run.file());
    const mark = 'id="recording">'; // its first occurrence is the empty element
    const place = page.indexOf(mark) + mark.length;
    download(new Blob([page.slice(0, place), data, page.slice(place)], { type: "text/html" }), `chairlift-${stamp()}.html`);
  }
}

function faultWords(count, isOff) {
  const times = count === 1 ? "once" : `${count} times`;
  const next = isOff ? "It is off until the engine is started again: the picture stands still, requests do not" : "It has started again, requests were not affected";
  return `What records this picture has failed ${times}. ${next}. The server's log says why.`;
}

function stamp() {
  return new Date().toISOString().slice(0, 19).replaceAll(":", "").replace("T", "-");
}

const app = new App();
window.chairlift = app; // for the console and for tests
app.start();
