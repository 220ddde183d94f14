"""The coding agents of `agents.py`, and what it records of them."""
