"""Tool calling: the tools of a request, the grammar of their calls and the parser of the model's text."""
