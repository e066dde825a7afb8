"""`chairlift bench long-context`."""
