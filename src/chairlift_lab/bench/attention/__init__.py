"""`chairlift bench attention`."""
