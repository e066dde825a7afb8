"""Orderings: which waiting request is admitted first."""
