"""The first minute of a server whose kernels are not compiled yet."""
