"""The formats in which models write tool calls, grouped by how the calls look."""
