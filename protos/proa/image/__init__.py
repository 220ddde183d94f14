"""Images of a prompt: resizing, hashing, and their places in the prompt. Only this package imports Pillow."""
