"""One module for each topic, with a value TOPIC."""
