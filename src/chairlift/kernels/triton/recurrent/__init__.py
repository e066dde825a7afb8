"""GPU kernels of recurrent layers."""
