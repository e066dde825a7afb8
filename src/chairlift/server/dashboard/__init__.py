"""The live page: what it is told of the engine's steps, how that is kept in a file, and the page itself."""
