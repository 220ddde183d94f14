"""Endpoints that return a model's values: embeddings and classes."""
