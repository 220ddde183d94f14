"""A sequence's output: tokens from an engine to text and values."""
