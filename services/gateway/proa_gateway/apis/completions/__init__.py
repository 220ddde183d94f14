"""OpenAI's completions."""
