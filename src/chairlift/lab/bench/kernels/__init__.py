"""`chairlift bench kernels`."""
