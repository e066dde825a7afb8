"""The OpenAI-compatible server: an HTTP front end and an engine process, joined by a private socket."""
