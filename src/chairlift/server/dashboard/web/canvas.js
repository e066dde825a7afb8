// What all canvases of the page share: sharp on every screen, drawn only when something changed.

export class Picture {
  constructor(canvas, draw) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.draw = draw;
    this.isStale = true;
    this.width = this.height = 0;
    new ResizeObserver(() => this.invalidate()).observe(canvas);
  }

  invalidate() {
    this.isStale = true;
  }

  // Called once for every frame of the screen.
  refresh() {
    if (!this.isStale || !this.canvas.clientWidth) return;
    this.isStale = false;
    const ratio = window.devicePixelRatio || 1;
    this.width = this.canvas.clientWidth;
    this.height = this.canvas.clientHeight;
    const [width, height] = [Math.round(this.width * ratio), Math.round(this.height * ratio)];
    if (this.canvas.width !== width || this.canvas.height !== height) {
      this.canvas.width = width;
      this.canvas.height = height;
    }
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.context.clearRect(0, 0, this.width, this.height);
    this.draw(this.context, this.width, this.height);
  }
}

// What is drawn once and then only put in place, until something that it depends on has changed.
export class Layer {
  constructor() {
    this.canvas = document.createElement("canvas");
    this.key = null;
  }

  // `key` says what it depends on; `draw` gets a context in which a unit is a pixel of the page.
  fill(width, height, key, draw) {
    const ratio = window.devicePixelRatio || 1;
    const whole = [width, height, ratio, document.documentElement.dataset.theme, key].join();
    if (whole === this.key) return this;
    this.key = whole;
    [this.width, this.height] = [width, height];
    this.canvas.width = Math.round(width * ratio); // which also clears it
    this.canvas.height = Math.round(height * ratio);
    const context = this.canvas.getContext("2d");
    context.scale(this.canvas.width / width, this.canvas.height / height);
    draw(context);
    return this;
  }

  put(context, x, y) {
    context.drawImage(this.canvas, x, y, this.width, this.height);
  }
}

// Diagonal lines, for what colour alone must not tell.
export function hatching(context, colour, spacing = 6, width = 1.2) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = spacing;
  const pen = tile.getContext("2d");
  pen.strokeStyle = colour;
  pen.lineWidth = width;
  pen.beginPath();
  for (const shift of [-spacing, 0, spacing]) {
    pen.moveTo(shift, spacing);
    pen.lineTo(shift + spacing, 0);
  }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}

export function pointerOn(canvas, event) {
  const box = canvas.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}

export const SMALL_FONT = "11px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
