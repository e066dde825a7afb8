"""Many machines: replicas of the server on an existing distributed engine."""
