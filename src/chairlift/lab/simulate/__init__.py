"""The commands `simulate` and `plan`."""
