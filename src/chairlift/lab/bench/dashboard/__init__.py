"""`chairlift bench dashboard`."""
