"""How many tokens per second the HTTP front end can stream."""
