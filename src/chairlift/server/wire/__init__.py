"""What all parts of the server share: messages to the engine, errors, limits and the rule for unknown fields."""
