"""`chairlift bench stress`."""
