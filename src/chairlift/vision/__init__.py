"""Images: reading them safely, preparing them, and encoding them into embeddings of prompts."""
