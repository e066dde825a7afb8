"""Packed weights on disk, so that later starts map them instead of packing them again."""
