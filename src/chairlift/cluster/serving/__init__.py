"""Replicas of the server on Ray Serve, with an ingress that routes requests to them."""
