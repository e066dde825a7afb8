// Plays a recorded run at any speed; seeks backwards by starting again.

import { byId, setText } from "./format.js";
import { Model } from "./model.js";

export class Replay {
  constructor(app) {
    this.app = app;
    this.frames = null;
    byId("replay-play").addEventListener("click", () => this.toggle());
    byId("replay-at").addEventListener("input", (event) => this.seek(this.first + Number(event.target.value)));
    byId("replay-speed").addEventListener("change", (event) => (this.speed = Number(event.target.value)));
    byId("replay-close").addEventListener("click", () => this.app.goLive());
  }

  open(frames, name) {
    this.frames = frames;
    let now = null;
    this.times = frames.map((frame) => (now = frame.now ?? now)); // frames without a time take that of the one before
    this.first = this.times.find((time) => time !== null);
    this.times = this.times.map((time) => time ?? this.first);
    this.last = this.times.at(-1);
    this.speed = 1;
    byId("replay-speed").value = "1";
    byId("replay").hidden = false;
    byId("replay-at").max = String(this.last - this.first);
    setText(byId("replay-name"), name);
    this.seek(this.first);
    this.play(true);
  }

  close() {
    this.frames = null;
    byId("replay").hidden = true;
  }

  get isOver() {
    return this.next >= this.frames.length;
  }

  toggle() {
    if (!this.isPlaying && this.isOver) this.seek(this.first);
    this.play(!this.isPlaying);
  }

  play(isPlaying) {
    this.isPlaying = isPlaying;
    this.tickedAt = performance.now();
    setText(byId("replay-play"), isPlaying ? "Pause" : "Play");
  }

  seek(time) {
    if (!this.app.model.isReplayed || time < this.time || !this.next) {
      this.app.model = new Model();
      this.app.model.isReplayed = true;
      this.app.forgetPlaces();
      this.next = 0;
    }
    this.advanceTo(time);
  }

  advanceTo(time) {
    this.time = time;
    let wasAny = false;
    for (; this.next < this.frames.length && this.times[this.next] <= time; this.next++) {
      this.app.model.apply(this.frames[this.next]);
      wasAny = true;
    }
    byId("replay-at").value = String(time - this.first);
    setText(byId("replay-clock"), `${(time - this.first).toFixed(1)} / ${(this.last - this.first).toFixed(1)} s`);
    if (wasAny) this.app.update();
  }

  // Called once per animation frame.
  tick(now) {
    if (!this.frames || !this.isPlaying) return;
    const elapsed = ((now - this.tickedAt) / 1000) * this.speed;
    this.tickedAt = now;
    this.advanceTo(Math.min(this.last, this.time + Math.max(0, elapsed)));
    if (this.isOver) this.play(false);
  }
}
