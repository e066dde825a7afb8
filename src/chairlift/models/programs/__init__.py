"""How a decoder runs its layers: plainly, or as programs of fused operations, by a pass for each device."""
