"""What the ingress of a fleet costs, with a stub engine."""
