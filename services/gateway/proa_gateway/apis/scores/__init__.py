"""Scores of pairs of texts, and of items by the probability of a token."""
