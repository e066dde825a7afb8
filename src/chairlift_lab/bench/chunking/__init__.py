"""`chairlift bench chunking`."""
