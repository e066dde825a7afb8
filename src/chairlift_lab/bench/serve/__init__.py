"""`chairlift bench serve`."""
