"""Proa on one machine: `proa serve MODEL` runs an engine and a gateway."""
