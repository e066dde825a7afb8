"""Other engines on the same requests, each in its own process."""
