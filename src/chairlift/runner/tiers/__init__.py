"""The stores of the tiers behind the prefix cache, and the threads that move parts between them and the device."""
