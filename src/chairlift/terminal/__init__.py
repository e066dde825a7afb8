"""Console output and option groups shared by all commands."""
