"""Model architectures, one family a file."""
