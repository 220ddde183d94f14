"""ImageError: an image that is not used."""


class ImageError(ValueError):
    """Its text is a sentence without a full stop for the user who sent the image."""
