"""`chairlift bench claims`."""
