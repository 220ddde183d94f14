"""Sessions, conversations of many turns, and which of them have a place in an engine's KV cache."""
