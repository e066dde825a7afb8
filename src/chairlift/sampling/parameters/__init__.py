"""The sampling parameters that edit logits or filter tokens, one module each, found through SAMPLING_PARAMETERS."""
