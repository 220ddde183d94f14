"""Anthropic's Messages API: other bodies, events and errors around the same conversations as chat completions."""
