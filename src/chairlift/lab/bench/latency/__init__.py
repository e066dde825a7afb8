"""`chairlift bench latency`."""
