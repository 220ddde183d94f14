"""The OpenAI API: requests, how they are served, responses."""
