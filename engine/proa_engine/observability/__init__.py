"""Metrics and spans of the engine and its workers."""
