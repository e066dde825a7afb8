"""Latent attention (MLA) on a GPU; `attention/latent.py` has the idea and the two forms."""
