"""The engine process and the front end side of its socket."""
