"""Endpoints for operators."""
