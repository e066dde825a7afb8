"""`chairlift bench policies`."""
