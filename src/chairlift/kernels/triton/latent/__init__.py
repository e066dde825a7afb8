"""Latent attention (MLA) on a GPU; `attention/interface.py` has the idea and the two forms."""
