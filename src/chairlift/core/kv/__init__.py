"""KV cache accounting: blocks, sharing, prefix index, eviction, swap."""
