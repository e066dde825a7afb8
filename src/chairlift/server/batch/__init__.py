"""Batch files: requests in, responses out, resumable."""
