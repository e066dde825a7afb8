"""Options declared once, as fields of a dataclass, with the checks and sources derived from the declaration."""
