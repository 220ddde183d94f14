"""Parse a model's output into reasoning, content and tool calls. One file for each format in `formats/`."""
