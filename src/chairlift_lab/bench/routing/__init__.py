"""What the router of an ingress costs for each request, by the number of replicas."""
