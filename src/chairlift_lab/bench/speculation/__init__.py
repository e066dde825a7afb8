"""`chairlift bench speculation`."""
