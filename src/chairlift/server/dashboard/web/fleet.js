// The page of a fleet: a lift for each replica, fed by one stream.

import { Picture } from "./canvas.js";
import { ChatPanel } from "./chat.js";
import { Connection } from "./connection.js";
import { byId, element, formatCount, formatPercent, setText } from "./format.js";
import { LiftDrawing } from "./lift_draw.js";
import { LiftTiles } from "./lift_tiles.js";
import { LiftView } from "./lift_view.js";
import { Model } from "./model.js";
import { startTheme } from "./theme.js";

const ROW_HEIGHT = 14; // of a slot
const LEAST_HEIGHT = 110;
const MOST_HEIGHT = 260;
const RATE_MS = 5000; // over which tokens per second are counted
const UPDATE_CHAT_MS = 100;

// The card of one replica.
class ReplicaLift {
  constructor(id, own) {
    this.model = new Model();
    this.view = new LiftView();
    this.tiles = new LiftTiles();
    this.summary = element("p", { class: "status" });
    this.pill = element("span", { class: "pill" });
    this.canvas = element("canvas", { role: "img" });
    this.card = element("section", { class: "card" },
      element("div", { class: "head" }, element("h2", {}, `Replica ${shortReplica(id)}`), this.pill, this.summary), this.canvas);
    this.picture = new Picture(this.canvas, (context, width, height) => {
      this.view.layout(width, height, this.model);
      new LiftDrawing(context, this.view, this.model, this.tiles, { hovered: null, selected: null, cursor: null, own }).draw();
    });
  }

  takeIn(frame) {
    this.model.apply(frame);
    const height = Math.min(MOST_HEIGHT, Math.max(LEAST_HEIGHT, this.view.rowsFor(this.model) * ROW_HEIGHT)) + 20;
    if (this.canvas.clientHeight !== height) this.canvas.style.height = `${height}px`;
    this.picture.invalidate();
  }

  describe(replica) {
    const { load } = replica;
    const kv = formatPercent(load.held_tokens / replica.num_tokens);
    const text = `${load.running} running, ${load.waiting} waiting, ${kv} of KV held, ${formatPercent(load.hit_rate)} cached, ${formatCount(load.output_tokens)} tokens`;
    setText(this.summary, text);
    setText(this.pill, replica.state);
    this.canvas.setAttribute("aria-label", `Timeline of slots and steps. ${text}.`);
  }

  refresh(isCalm) {
    if (this.view.width && this.view.follow(this.model, isCalm)) this.picture.invalidate();
    this.picture.refresh();
  }
}

class FleetApp {
  constructor() {
    this.lifts = new Map(); // by the replica's id
    this.fleet = null; // the last report
    this.own = new Set(); // the ids of the chat's requests
    this.isLive = true;
    this.outputs = []; // [time, output tokens by replica] of the last seconds
    this.isCalm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.connection = new Connection((frame) => this.takeIn(frame), (state, reason) => this.showState(state, reason));
  }

  start() {
    startTheme(() => this.lifts.forEach((lift) => lift.picture.invalidate()));
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.connection.setKey(byId("key-input").value.trim());
    });
    const tick = () => {
      this.lifts.forEach((lift) => lift.refresh(this.isCalm));
      requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
    this.chat = new ChatPanel(this);
    setInterval(() => this.update(), UPDATE_CHAT_MS);
    this.connection.start();
  }

  update() {
    this.chat?.update();
  }

  // What a replica says of the model, which is that of all; a new object only if another model is served.
  get hello() {
    const greeted = [...this.lifts.values()].map((lift) => lift.model.hello).find((hello) => hello.model);
    return (this.greeting = greeted && this.greeting?.model !== greeted.model ? greeted : this.greeting) || {};
  }

  findRequest(id) {
    return [...this.lifts.values()].map((lift) => lift.model.requests.get(id)).find(Boolean) || null;
  }

  takeIn(frame) {
    if (frame.t === "fleet") this.showFleet(frame);
    else if (frame.t === "replica") this.lifts.get(frame.id)?.takeIn(frame.frame);
  }

  showFleet(fleet) {
    this.fleet = fleet;
    for (const id of [...this.lifts.keys()].filter((id) => !fleet.shown.includes(id))) {
      this.lifts.get(id).card.remove();
      this.lifts.delete(id);
    }
    for (const id of fleet.shown.filter((id) => !this.lifts.has(id))) {
      const lift = new ReplicaLift(id, this.own);
      this.lifts.set(id, lift);
      byId("replicas").append(lift.card);
    }
    for (const replica of fleet.replicas) this.lifts.get(replica.id)?.describe(replica);
    this.showTiles(fleet);
  }

  showTiles({ replicas, shown, model, router }) {
    const sum = (field) => replicas.reduce((total, replica) => total + replica.load[field], 0);
    const room = replicas.reduce((total, replica) => total + replica.num_tokens, 0);
    setText(byId("model-name"), model);
    setText(byId("tile-ready"), `${replicas.filter((replica) => replica.state === "ready").length} / ${replicas.length}`);
    setText(byId("tile-running"), formatCount(sum("running")));
    setText(byId("tile-waiting"), formatCount(sum("waiting")));
    setText(byId("tile-rate"), formatCount(this.rate(replicas)));
    setText(byId("tile-kv"), formatPercent(room ? sum("held_tokens") / room : 0));
    setText(byId("tile-hits"), formatPercent(sum("prompt_tokens") ? sum("cached_tokens") / sum("prompt_tokens") : 0));
    setText(byId("tile-router"), router);
    byId("more").hidden = shown.length === replicas.length;
    setText(byId("more"), `The first ${shown.length} of ${replicas.length} replicas are shown.`);
  }

  // Tokens per second, of replicas that were there all the time: others begin to count at 0.
  rate(replicas) {
    const now = performance.now();
    this.outputs.push([now, new Map(replicas.map((replica) => [replica.id, replica.load.output_tokens]))]);
    while (now - this.outputs[0][0] > RATE_MS) this.outputs.shift();
    const [[then, before], [, current]] = [this.outputs[0], this.outputs.at(-1)];
    let tokens = 0;
    for (const [id, count] of current) if (before.has(id)) tokens += Math.max(0, count - before.get(id));
    return now > then ? (tokens * 1000) / (now - then) : 0;
  }

  showState(state, reason = "") {
    document.documentElement.dataset.state = state;
    setText(byId("state"), state === "key" ? "needs a key" : state);
    byId("key-form").hidden = state !== "key";
    if (state !== "connecting") byId("refusal").hidden = state !== "refused";
    if (state === "refused") setText(byId("refusal"), `The fleet shows nothing to this page: ${reason}.`);
    if (state === "connecting") this.lifts.forEach((lift) => (lift.model = new Model()));
  }
}

function shortReplica(id) {
  return id.split("#").at(-1).slice(-8);
}

const fleetApp = new FleetApp();
window.chairlift = fleetApp; // for the console and for tests
fleetApp.start();
