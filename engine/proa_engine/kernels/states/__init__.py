"""Recurrent states: the delta rule and short convolutions."""
