"""Matrix products with 4-bit weights."""
