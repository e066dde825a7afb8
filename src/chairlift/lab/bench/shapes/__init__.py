"""`chairlift bench shapes`."""
