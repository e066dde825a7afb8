"""Uploaded files and batches of requests, kept in a folder."""
