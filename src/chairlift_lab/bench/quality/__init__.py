"""`chairlift bench quality`."""
