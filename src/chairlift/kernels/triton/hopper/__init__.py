"""Kernels for Hopper GPUs, written in Gluon; those of latent attention are in latent/."""
