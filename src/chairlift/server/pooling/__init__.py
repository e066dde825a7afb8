"""Endpoints that return vectors or scores of prompts: /v1/embeddings, /v1/score and /v1/rerank."""
