"""Images in requests: from a URL to the pixels that an engine reads."""
