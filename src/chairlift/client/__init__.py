"""Clients for OpenAI-compatible servers, with little work per token."""
