"""Proa's gateway: the OpenAI API, tokenization, streaming and routing in front of engines."""
