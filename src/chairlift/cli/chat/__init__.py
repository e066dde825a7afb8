"""`chairlift chat`."""
