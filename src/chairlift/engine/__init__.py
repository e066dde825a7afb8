"""The engine: the loop around scheduler and executor, and how one is started."""
