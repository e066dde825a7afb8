"""The /v1/responses endpoint."""
