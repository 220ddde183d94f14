"""Proa's gateway: HTTP, tokens, text, streaming and routing in front of engines. Never torch."""
