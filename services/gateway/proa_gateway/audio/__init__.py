"""Audio files in requests: decoded in processes of their own, in windows that a model reads."""
