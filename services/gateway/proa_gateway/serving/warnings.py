"""Warnings about a request that is served although a part of it has no effect: a response header, and the log."""

import logging
from collections.abc import Iterable, Sequence
from typing import Final

WARNINGS_HEADER: Final = b"x-proa-warnings"
MAX_WARNINGS = 10  # in the header
MAX_CHARACTERS = 200  # of a warning
MAX_LOGGED = 1000  # texts; clients choose them
_log = logging.getLogger(__name__)


class LogOnce:
    """Logs each text once."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._logged: set[str] = set()

    def warn(self, message: str, texts: Iterable[str]) -> None:
        """Log `message % text` for each text that is new."""
        for text in texts:
            if text not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(text)
                self._log.warning(message, text)


class Warnings:
    """Logs each warning once."""

    def __init__(self) -> None:
        self._log_once = LogOnce(_log)

    def headers(self, warnings: Sequence[str]) -> list[tuple[bytes, bytes]]:
        """A response header with the warnings in printable ASCII, if there are any."""
        short = [_printable(warning[:MAX_CHARACTERS]) for warning in warnings[:MAX_WARNINGS]]
        self._log_once.warn("%s; later requests with it are not logged", short)
        return [(WARNINGS_HEADER, "; ".join(short).encode())] if short else []


def _printable(text: str) -> str:
    return "".join(character if " " <= character <= "~" else ascii(character)[1:-1] for character in text)
