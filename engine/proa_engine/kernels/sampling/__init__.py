"""Sampling, drafts and masks."""
