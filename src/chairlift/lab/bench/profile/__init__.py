"""`chairlift bench profile`."""
