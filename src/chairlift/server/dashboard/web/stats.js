// The last few thousand values of a series, and their percentiles.

export class Reservoir {
  constructor(size = 4096) {
    this.values = new Float64Array(size);
    this.count = 0; // number of values ever added
    this.sorted = null;
  }

  add(value) {
    this.values[this.count++ % this.values.length] = value;
    this.sorted = null;
  }

  percentile(share) {
    const kept = Math.min(this.count, this.values.length);
    if (!kept) return null;
    this.sorted ||= this.values.slice(0, kept).sort();
    return this.sorted[Math.min(kept - 1, Math.floor(share * kept))];
  }
}

// The insertion point of `value` in `items`, ordered by `key`: the first index with a larger key.
export function upperBound(items, value, key) {
  let low = 0;
  let high = items.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (key(items[middle]) <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}
