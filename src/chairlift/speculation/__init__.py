"""Speculative decoding: proposers of draft tokens and the controller that decides how many to verify."""
