"""Kernels of other libraries beside ours."""
