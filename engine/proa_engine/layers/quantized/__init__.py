"""Linear layers whose weights are stored in fewer bits."""
