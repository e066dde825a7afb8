"""How many draft tokens to verify, from acceptance, cost and measured speedup. Imports no torch."""
