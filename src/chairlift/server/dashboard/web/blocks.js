// The KV block pool: the holders of each block.

const FLASH_SECONDS = 1.5; // how long an eviction stays visible

export class Blocks {
  constructor() {
    this.reset({ num_blocks: 0, block_size: 16, blocks: [], now: 0 });
    this.evictions = 0;
  }

  reset(key) {
    this.size = key.block_size;
    this.count = key.num_blocks;
    this.references = new Uint16Array(this.count);
    this.cached = new Uint8Array(this.count);
    this.evictedAt = new Float64Array(this.count).fill(-Infinity);
    this.holders = new Set(); // requests with a table
    this.owners = null; // the first holder of each block; computed on demand
    this.now = key.now;
    this.set(key.blocks);
  }

  set(triples) {
    for (let at = 0; at < triples.length; at += 3) {
      this.references[triples[at]] = triples[at + 1];
      this.cached[triples[at]] = triples[at + 2];
    }
    this.owners = null;
  }

  change(triples, now) {
    this.now = now;
    for (let at = 0; at < triples.length; at += 3) {
      const block = triples[at];
      const wasKept = this.cached[block] && !this.references[block];
      if (wasKept && !triples[at + 2]) this.evictedAt[block] = now;
    }
    this.set(triples);
  }

  setTable(request, start, blocks) {
    if (!request) return;
    request.table.splice(start, Infinity, ...blocks);
    if (request.table.length) this.holders.add(request);
    else this.holders.delete(request);
    this.owners = null;
  }

  ownerOf(block) {
    if (!this.owners) {
      this.owners = new Array(this.count).fill(null);
      for (const request of this.holders) for (const held of request.table) this.owners[held] ||= request;
    }
    return this.owners[block];
  }

  wasJustEvicted(block) {
    return this.now - this.evictedAt[block] < FLASH_SECONDS;
  }

  tally() {
    const found = { used: 0, shared: 0, kept: 0, empty: 0 };
    for (let block = 0; block < this.count; block++) {
      if (this.references[block] > 1) found.shared++;
      if (this.references[block]) found.used++;
      else if (this.cached[block]) found.kept++;
      else found.empty++;
    }
    return found;
  }
}
