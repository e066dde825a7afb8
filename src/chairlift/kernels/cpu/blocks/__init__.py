"""Products with weights in the blocks of GGUF files, computed as they are stored."""
