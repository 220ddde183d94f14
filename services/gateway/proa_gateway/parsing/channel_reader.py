"""ChannelReader: a `MessageReader` for an answer in channels."""

from proa_gateway.parsing.call_reader import Schemas
from proa_gateway.parsing.channel_header import ChannelHeader
from proa_gateway.parsing.compiled_format import CompiledFormat, State
from proa_gateway.parsing.format import Channels, Route
from proa_gateway.parsing.message_reader import MessageReader
from proa_gateway.parsing.terminals import Action, Terminal

_OF_HEADERS = frozenset({Action.OPEN_MESSAGE, Action.OPEN_CHANNEL, Action.OPEN_BODY})


class ChannelReader(MessageReader):
    """Adds the state in which a header is read. Text before the first header is content."""

    __slots__ = ("_header",)

    def __init__(self, compiled: CompiledFormat, channels: Channels, schemas: Schemas) -> None:
        super().__init__(compiled, schemas, reasoning_open=False)
        self._header = ChannelHeader(channels)
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
            case Route.CALL:
                self._events += self._begin_calls().start(name)
