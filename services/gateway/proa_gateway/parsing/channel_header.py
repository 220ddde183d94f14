"""ChannelHeader: the header of one message of an answer in channels."""

import re

from proa_gateway.parsing.format import Channels, Route


class ChannelHeader:
    """Collects headers, one after the other."""

    __slots__ = ("_before", "_begun", "_routes", "_sender", "_text")

    def __init__(self, channels: Channels) -> None:
        self._routes = [(re.compile(pattern), route) for pattern, route in channels.routes]
        self._sender = ""
        self._before = ""  # what stands before the channel
        self._text: list[str] = []
        self._begun = False  # a token of a header has come

    @property
    def stray_text(self) -> str:
        """Text that has come without any header."""
        return "" if self._begun else "".join(self._text)

    def begin(self, sender: str) -> None:
        """Begin a header. `sender`: text that may come first and says nothing."""
        self._sender = sender
        self._before = ""
        self._text.clear()
        self._begun = True

    def open_channel(self) -> None:
        self._before = "".join(self._text).strip().removeprefix(self._sender)
        self._text.clear()
        self._begun = True

    def text(self, text: str) -> None:
        self._text.append(text)

    def route(self) -> tuple[Route, str]:
        """What the message is that begins now, and the name of a call."""
        header = f"{''.join(self._text).strip()} {self._before}".strip()
        for pattern, route in self._routes:
            if found := pattern.match(header):
                return route, found.groupdict().get("name") or ""
        return Route.CONTENT, ""
