"""Several HTTP processes (workers) in front of one engine, joined by the main process (the hub)."""
