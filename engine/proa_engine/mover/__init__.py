"""The mover: one process a rank that exchanges pages of host memory with other engines. It imports no torch."""
