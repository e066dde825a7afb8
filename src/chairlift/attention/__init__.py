"""Attention over a ragged batch, behind one interface."""
