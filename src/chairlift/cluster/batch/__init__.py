"""Batches on many machines: `chairlift batch --ray`, and predictions in Ray Data."""
