"""What this process may use of the machine: cores, memory nodes, and the limits of its container."""
