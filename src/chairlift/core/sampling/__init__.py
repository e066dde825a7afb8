"""The sampling parameters of a request and the values derived from them; no tensors."""
