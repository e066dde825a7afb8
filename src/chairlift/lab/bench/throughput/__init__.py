"""`chairlift bench throughput`."""
