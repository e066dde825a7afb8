"""Batch files: requests in, responses out, resumable; and /v1/files and /v1/batches."""
