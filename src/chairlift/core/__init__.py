"""The brain: requests, scheduling and KV accounting. Pure Python; nothing here imports torch."""
