"""ChannelHeader: the header of one message of an answer in channels."""

import re

from proa_gateway.parsing.format import Channels, Route
from proa_gateway.parsing.terminals import Action, Terminal


class ChannelHeader:
    """Collects headers, one after the other."""

    __slots__ = ("_before", "_begun", "_routes", "_sender", "_text")

    def __init__(self, channels: Channels) -> None:
        self._routes = [(re.compile(pattern), route) for pattern, route in channels.routes]
        self._sender = ""  # text that may come first and is ignored
        self._before = ""  # what stands before the channel
        self._text: list[str] = []
        self._begun = False  # a token of a header has come

    @property
    def stray_text(self) -> str:
        """Text that has come without any header."""
        return "" if self._begun else "".join(self._text)

    def text(self, text: str) -> None:
        self._text.append(text)

    def terminal(self, terminal: Terminal, *, continues: bool) -> tuple[Route, str] | None:
        """The next terminal of a header, which `continues` the one that has begun. Returns what the body is that begins
        now, with the name of a call; None: the header goes on."""
        if terminal.action is Action.OPEN_BODY:
            return self._route()
        if terminal.action is Action.OPEN_MESSAGE or not continues:
            self._sender = terminal.rest
            self._before = ""
            self._text.clear()
        if terminal.action is Action.OPEN_CHANNEL:
            self._before = "".join(self._text).strip().removeprefix(self._sender)
            self._text.clear()
        self._begun = True
        return None

    def _route(self) -> tuple[Route, str]:
        header = f"{''.join(self._text).strip()} {self._before}".strip()
        for pattern, route in self._routes:
            if found := pattern.match(header):
                return route, found.groupdict().get("name") or ""
        return Route.CONTENT, ""
