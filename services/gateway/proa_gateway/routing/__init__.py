"""Routing: which engine takes a request, from the engines' loads and the blocks in their prefix caches."""
