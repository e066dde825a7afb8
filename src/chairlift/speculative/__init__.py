"""Networks that guess what a model will say."""
