"""Processes of an engine: starting them, their connections and collective operations."""
