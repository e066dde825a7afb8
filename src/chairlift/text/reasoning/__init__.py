"""Reasoning in a model's output: parsing, grammars and the thinking budget."""
