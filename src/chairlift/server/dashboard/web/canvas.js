// Shared by all canvases: sharp on every screen, redrawn only after a change.

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

  // Called once per animation frame.
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

// A cached drawing, redrawn only when its key changes.
export class Layer {
  constructor() {
    this.canvas = document.createElement("canvas");
    this.key = null;
  }

  // `key` names everything the drawing depends on; `draw` gets a context in which a unit is a pixel of the page.
  fill(width, height, key, draw) {
    const ratio = window.devicePixelRatio || 1;
    const whole = [width, height, ratio, document.documentElement.dataset.theme, key].join();
    if (whole === this.key) return this;
    this.key = whole;
    [this.width, this.height] = [width, height];
    this.canvas.width = Math.round(width * ratio); // also clears the canvas
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

// Diagonal lines, because colour alone must not carry meaning.
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
