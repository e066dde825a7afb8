"""Sampling on the host: from the logits of a batch to one token per row."""
