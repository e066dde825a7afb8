"""`chairlift bench soak`."""
