"""Structured output: grammars and the token masks that enforce them."""
