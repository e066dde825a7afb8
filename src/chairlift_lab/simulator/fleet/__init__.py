"""The size of a simulated fleet, and the ingresses in front of it."""
