"""The path of a generation request: admission, tokenization, submission and response."""
