"""The OpenAI API: what clients send, what they get back. Knows nothing of engines' connections or of gRPC."""
