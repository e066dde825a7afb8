"""Matrix products with few rows: the kernel, its tilings, and its launch."""
