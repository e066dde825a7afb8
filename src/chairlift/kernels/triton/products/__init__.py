"""Matrix products with few rows, batch-invariant ones, and the activations between products."""
