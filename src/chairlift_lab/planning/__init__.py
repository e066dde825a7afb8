"""Traffic, replicas and the search for the highest rate: the commands `simulate` and `plan`."""
