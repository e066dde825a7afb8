"""API keys and what each of them may use."""
