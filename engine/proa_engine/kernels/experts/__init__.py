"""Mixtures of experts: routing and products."""
