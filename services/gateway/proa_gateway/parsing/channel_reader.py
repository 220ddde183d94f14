"""ChannelReader: a `MessageReader` for an answer in channels."""

import re

from proa_gateway.parsing.call_reader import Schemas
from proa_gateway.parsing.compiled_format import Action, CompiledFormat, State, Terminal
from proa_gateway.parsing.format import Channels, Route
from proa_gateway.parsing.message_reader import MessageReader

_OF_HEADERS = frozenset({Action.OPEN_MESSAGE, Action.OPEN_CHANNEL, Action.OPEN_BODY})


class ChannelHeader:
    """Collects headers, one after the other."""

    __slots__ = ("_before", "_begun", "_routes", "_sender", "_text")

    def __init__(self, channels: Channels) -> None:
        self._routes = [(re.compile(pattern), route) for pattern, route in channels.routes]
        self._sender = ""  # text that may come first and is ignored
        self._before = ""  # what stands before the channel
        self._text: list[str] = []  # since the last terminal
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
            self._before, self._sender = self._after_sender(), ""
            self._text.clear()
        self._begun = True
        return None

    def bare(self, text: str) -> None:
        """A header has come in a body."""
        self._sender = self._before = ""
        self._text[:] = [text]

    def _after_sender(self) -> str:
        return "".join(self._text).strip().removeprefix(self._sender).strip()

    def _route(self) -> tuple[Route, str]:
        header = f"{self._after_sender()} {self._before}".strip()
        for pattern, route in self._routes:
            if found := pattern.match(header):
                return route, found.groupdict().get("name") or ""
        return Route.CONTENT, ""


class ChannelReader(MessageReader):
    """Adds the state in which a header is read. Text before the first header is content."""

    __slots__ = ("_bare", "_header")

    def __init__(self, compiled: CompiledFormat, channels: Channels, schemas: Schemas) -> None:
        super().__init__(compiled, schemas, reasoning_open=False)
        self._header = ChannelHeader(channels)
        self._bare = re.compile(rf"\s+{re.escape(channels.bare)}[^\s<]+" if channels.bare else "(?!)")
        self.state = State.HEADER

    def finish(self) -> None:
        super().finish()
        if self.state is State.HEADER:
            self._emit(self._header.stray_text)

    def _step(self, text: str) -> str:
        if self.state is not State.HEADER:
            return super()._step(text)
        self._header.text(text)
        return ""

    def _leave_text(self, before: str, terminal: Terminal) -> None:
        if terminal.action is Action.OPEN_BODY and self._bare.fullmatch(before):
            self._header.bare(before)
            before = ""
        super()._leave_text(before, terminal)

    def _enter(self, terminal: Terminal, space: str) -> None:
        if terminal.action not in _OF_HEADERS:
            super()._enter(terminal, space)
        elif body := self._header.terminal(terminal, continues=self.state is State.HEADER):
            self._enter_body(*body)
        else:
            self.state, self._expected = State.HEADER, None

    def _enter_body(self, route: Route, name: str) -> None:
        match route:
            case Route.REASONING:
                self.state = State.REASONING
            case Route.CONTENT:
                self.state = State.CONTENT
            case Route.CALL if name:
                self._events += self._begin_calls().start(name)
            case Route.CALL:
                self.state = State.CONTENT  # if no call begins
                self._begin_calls()
