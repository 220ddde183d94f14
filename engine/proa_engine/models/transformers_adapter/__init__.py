"""Models that have no module of their own here, run by `transformers` with Proa's attention and products.

Needs the engine's extra `transformers`. Its modules import the library, so they are imported on use.
"""
