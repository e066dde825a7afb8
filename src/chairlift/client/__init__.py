"""Talking to an OpenAI-compatible server, ours or another, with next to no work per token."""
