"""Messages of libraries that have handlers of their own."""

import logging


def use_our_handlers(library: str) -> None:
    """Log the library's messages as those of all others. Call it after the library's import, which adds a handler."""
    logger = logging.getLogger(library)
    logger.handlers.clear()
    logger.propagate = True
