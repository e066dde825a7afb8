"""The live dashboard: recording steps, streaming frames, and the page itself."""
