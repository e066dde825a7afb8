// The last few thousand values of something, and their percentiles.

export class Reservoir {
  constructor(size = 4096) {
    this.values = new Float64Array(size);
    this.count = 0; // of all that were ever added
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

// Where `value` would go in `items`, ordered by `key`: the first index whose key is above it.
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
