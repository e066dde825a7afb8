"""`chairlift make-model`: checkpoints of public shapes with random weights, to measure without downloads."""
