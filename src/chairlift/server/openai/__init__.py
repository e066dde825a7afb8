"""Request types and response builders of /v1/completions and /v1/chat/completions."""
