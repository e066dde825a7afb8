"""How much of the prompts a fleet finds in its caches, beside the prediction of the simulator."""
