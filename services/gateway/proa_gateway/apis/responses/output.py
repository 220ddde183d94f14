"""OutputItems: the items of a response's output, and the events that stream them."""

from collections.abc import Callable, Collection, Iterable, Sequence

from proa.contract import TokenLogprobs
from proa_gateway.apis.responses.items import Fields, Status, new_id, output_text
from proa_gateway.apis.responses.tools import CallName
from proa_gateway.output.text import Delta
from proa_gateway.parsing.events import (
    ArgumentsDelta,
    CallEnded,
    CallStarted,
    ContentDelta,
    MessageEvent,
    ReasoningDelta,
)
from proa_gateway.parsing.input_text import InputText

LogprobsOf = Callable[[Sequence[TokenLogprobs]], list[Fields]]
Event = tuple[str, Fields]
"""The event's type and its fields."""


class OutputItems:
    """Builds items from a message's events. `items` are those that have ended."""

    def __init__(
        self,
        *,
        includes_reasoning: bool,
        logprobs: LogprobsOf | None,
        call_names: Iterable[CallName] = (),
        custom_tools: Collection[str] = (),
    ) -> None:
        """`logprobs` renders the log probabilities of the text's tokens; None: not requested. `call_names`: the
        functions' names. `custom_tools`: flat names of those that are custom tools."""
        self.items: list[Fields] = []
        self._includes_reasoning = includes_reasoning
        self._render_logprobs = logprobs
        self._call_names = {name.flat: name for name in call_names}  # by their flat names
        self._custom_tools = custom_tools
        self._input = InputText()  # of the custom call that has not ended
        self._open: Fields | None = None  # the item that has not ended
        self._texts: list[str] = []  # its text, or the arguments or the input of the call
        self._logprobs: list[Fields] = []  # of its text
        self._held: list[TokenLogprobs] = []  # of tokens whose text has not come yet
        self._events: list[Event] = []  # not returned yet

    def add(self, events: Sequence[MessageEvent], delta: Delta) -> list[Event]:
        self._held += delta.logprobs
        if delta.finish_reason == "length" and events and isinstance(events[-1], CallEnded):
            events = events[:-1]  # the limit has ended the call
        last = max((at for at, event in enumerate(events) if isinstance(event, ContentDelta)), default=-1)
        for at, event in enumerate(events):
            self._add(event, takes_logprobs=at == last)
        if events and last < 0:
            self._held.clear()
        if delta.finish_reason is None:
            return self._take_events()
        self._logprobs += self._take_logprobs()  # of the end token
        return self.close("incomplete" if delta.finish_reason == "length" else "completed")

    def close(self, status: Status) -> list[Event]:
        """End the item that is open, if there is one."""
        if self._open is not None:
            if self._open["type"] == "custom_tool_call":
                self._grow_input(self._input.close())
            item, text = {**self._open, "status": status}, "".join(self._texts)
            if item["type"] == "function_call":
                item["arguments"] = text
                self._emit("response.function_call_arguments.done", name=item["name"], arguments=text)
            elif item["type"] == "custom_tool_call":
                item["input"] = text
                self._emit("response.custom_tool_call_input.done", input=text)
            else:
                item["content"] = [self._end_part(item["type"], text)]
            self._emit_item("done", item)
            self.items.append(item)
        self._open, self._texts, self._logprobs = None, [], []
        return self._take_events()

    def _add(self, event: MessageEvent, *, takes_logprobs: bool) -> None:
        match event:
            case ContentDelta(text):
                is_first = self._in("message")
                logprobs = self._take_logprobs() if takes_logprobs else []
                if is_first:
                    logprobs = _last(logprobs, len(text.encode()))
                self._logprobs += logprobs
                self._grow("response.output_text.delta", text, content_index=0, logprobs=logprobs)
            case ReasoningDelta(text) if self._includes_reasoning:
                self._in("reasoning")
                self._grow("response.reasoning_text.delta", text, content_index=0)
            case CallStarted(_, id, name):
                names = self._call_names.get(name, CallName(name)).fields()
                if name in self._custom_tools:
                    self._start({"id": new_id("ctc_"), "call_id": id, **names, "input": ""}, "custom_tool_call")
                    self._input = InputText()
                else:
                    self._start({"id": new_id("fc_"), "call_id": id, **names, "arguments": ""}, "function_call")
            case ArgumentsDelta(_, text) if self._open is not None and self._open["type"] == "custom_tool_call":
                self._grow_input(self._input.feed(text))
            case ArgumentsDelta(_, text):
                self._grow("response.function_call_arguments.delta", text)
            case CallEnded():
                self._events = self.close("completed")

    def _in(self, kind: str) -> bool:
        """Open an item of type `kind` unless one is open. Returns whether it did."""
        if self._open is not None and self._open["type"] == kind:
            return False
        if kind == "message":
            self._start({"id": new_id("msg_"), "role": "assistant", "content": []}, kind)
        else:
            self._start({"id": new_id("rs_"), "summary": [], "content": []}, kind)
        self._emit("response.content_part.added", content_index=0, part=_part(kind, "", []))
        return True

    def _start(self, fields: Fields, kind: str) -> None:
        self._events = self.close("completed")
        self._open = {"type": kind, **fields, "status": "in_progress"}
        self._emit_item("added", self._open)

    def _grow(self, event: str, text: str, **fields: object) -> None:
        self._texts.append(text)
        self._emit(event, delta=text, **fields)

    def _grow_input(self, text: str) -> None:
        if text:
            self._grow("response.custom_tool_call_input.delta", text)

    def _end_part(self, kind: str, text: str) -> Fields:
        if kind == "message":
            self._emit("response.output_text.done", content_index=0, text=text, logprobs=self._logprobs)
        else:
            self._emit("response.reasoning_text.done", content_index=0, text=text)
        part = _part(kind, text, self._logprobs)
        self._emit("response.content_part.done", content_index=0, part=part)
        return part

    def _emit(self, event: str, **fields: object) -> None:
        assert self._open is not None
        self._events.append((event, {"item_id": self._open["id"], "output_index": len(self.items), **fields}))

    def _emit_item(self, event: str, item: Fields) -> None:
        self._events.append((f"response.output_item.{event}", {"output_index": len(self.items), "item": item}))

    def _take_logprobs(self) -> list[Fields]:
        held, self._held = self._held, []
        return self._render_logprobs(held) if self._render_logprobs is not None else []

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events


def _part(kind: str, text: str, logprobs: list[Fields]) -> Fields:
    return output_text(text, logprobs) if kind == "message" else {"type": "reasoning_text", "text": text}


def _last(logprobs: list[Fields], num_bytes: int) -> list[Fields]:
    """Return the entries of the tokens that the last `num_bytes` bytes come from. Earlier entries belong to a marker,
    or to whitespace beside it."""
    start, num_after = len(logprobs), 0
    while start > 0 and num_after < num_bytes:
        start -= 1
        num_after += len(logprobs[start]["bytes"])
    return logprobs[start:]
