"""`chairlift bench tenants`."""
