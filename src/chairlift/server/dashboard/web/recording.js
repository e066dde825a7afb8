// Runs as files: one frame per line, compressed. The last minutes can always be saved.

const GENERATION_CHARS = 12e6; // two of them are kept

export class RunBuffer {
  constructor(onFull) {
    this.onFull = onFull; // requests a new stream: a recording must begin with a keyframe
    this.older = [];
    this.newer = [];
    this.size = 0;
  }

  push(frame, text) {
    if (frame.t === "hello") this.turnOver();
    this.newer.push(text);
    this.size += text.length;
    if (this.size > GENERATION_CHARS) {
      this.size = 0;
      this.onFull();
    }
  }

  turnOver() {
    if (this.newer.length > 20) this.older = this.newer; // a few frames of a broken connection are not worth keeping
    this.newer = [];
    this.size = 0;
  }

  get isEmpty() {
    return !this.newer.length;
  }

  async file() {
    const lines = [...this.older, ...this.newer].join("\n") + "\n";
    return new Blob([await compressed(lines)], { type: "application/gzip" });
  }
}

async function compressed(text) {
  const stream = new Blob([text]).stream().pipeThrough(new CompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

// The frames of a file, compressed or plain.
export async function readRun(bytes) {
  const data = new Uint8Array(bytes);
  let text;
  if (data[0] === 0x1f && data[1] === 0x8b) {
    const stream = new Blob([data]).stream().pipeThrough(new DecompressionStream("gzip"));
    text = await new Response(stream).text();
  } else {
    text = new TextDecoder().decode(data);
  }
  const frames = text.split("\n").filter(Boolean).map((line) => JSON.parse(line));
  if (!frames.some((frame) => frame.t === "key")) throw new Error("this is not a recorded run: it has no keyframe");
  return frames;
}

export function bytesOfBase64(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

export async function base64OfBlob(blob) {
  const bytes = new Uint8Array(await blob.arrayBuffer());
  let text = "";
  for (let at = 0; at < bytes.length; at += 32768) text += String.fromCharCode(...bytes.subarray(at, at + 32768));
  return btoa(text);
}

export function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
