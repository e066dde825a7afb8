"""`chairlift bench prefix`."""
