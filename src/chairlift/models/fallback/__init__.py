"""Models that run with the code of transformers, and our attention in place of theirs."""
