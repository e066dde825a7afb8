"""The formats in which models write their reasoning, one module each."""
