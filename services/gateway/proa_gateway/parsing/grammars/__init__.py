"""Grammars of messages: what a model may write, in the syntax of its format."""
