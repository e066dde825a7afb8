"""The GPU executor: packed inputs, CUDA graphs, asynchronous steps."""
