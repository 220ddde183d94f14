"""Drafters that read a model's hidden states: their interface, their configurations and their weights."""
