"""`chairlift cluster`."""
