"""The layer stacks: ways to run a decoder's layers, of which one is chosen when a model is built."""
