"""The scheduler: which request computes which tokens in the next step."""
