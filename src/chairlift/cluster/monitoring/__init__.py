"""What the ingress shows of the whole fleet: metrics and the dashboard."""
