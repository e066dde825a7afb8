"""Recurrent layers, whose state has a fixed size, instead of keys and values for each token."""
