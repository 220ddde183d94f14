"""Endpoints that compute values from texts instead of generating tokens: embeddings, classes, scores of pairs."""
