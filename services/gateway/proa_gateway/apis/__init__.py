"""The HTTP APIs. Each is a folder: routes, protocol (bodies), job (what engines get), render (what clients get)."""
