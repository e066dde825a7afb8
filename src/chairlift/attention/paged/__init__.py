"""Ragged attention that reads keys and values in place, block by block: one implementation per device."""
