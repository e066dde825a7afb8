"""Training of draft heads. Needs nothing but torch, safetensors and what loads the target."""
