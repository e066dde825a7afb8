"""Training of draft heads for speculative decoding."""
