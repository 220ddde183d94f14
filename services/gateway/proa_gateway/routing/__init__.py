"""Routing: which engine takes a request. Knows addresses, loads and names of blocks; no sessions, no text, no HTTP."""
