"""Changes a conversation into one of a shape that its chat template reads.

    system, user, system                  a template that reads one system message, the first
    system, user, user: <system-reminder>…</system-reminder>

    user, assistant: text + call, tool    a template that leaves out the text beside a call
    user, assistant: text, assistant: call, tool

A message stays at its place. Other servers move later system messages to the start of the prompt: then each of them
changes the whole prompt, and nothing behind it is found in the prefix cache.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

from proa.template_rules import REASONING_FIELDS, Content, Message, TemplateRules, role_of, text_part

REMINDER: Final = ("<system-reminder>\n", "\n</system-reminder>")
"""Around a system message that becomes the user's. Coding agents write the same tag."""
OPENING: Final = "."
"""A user's message before an answer that comes first."""
WriteCall = Callable[[str, str], str]
"""A call's name and arguments to its text."""
_GAP = "\n\n"
_TEMPLATE = "messages: the model's chat template reads"
ONE_SYSTEM: Final = f"{_TEMPLATE} one system message, so those at the start were joined"
NO_SYSTEM: Final = f"{_TEMPLATE} no system message, so it was given as the user's"
ONLY_SYSTEM: Final = f"{_TEMPLATE} no system message alone, so it was given as the user's"
LATER_SYSTEM: Final = f"{_TEMPLATE} no later system message, so it was given as the user's in <system-reminder>"
NO_CALLS: Final = f"{_TEMPLATE} no calls, so they and their results were given as text"
OPEN_CALL: Final = f"{_TEMPLATE} no call without a result, so it was given as text"
ONE_CALL: Final = f"{_TEMPLATE} one call in a message, so each call got a message, with its result behind it"
TEXT_APART: Final = f"{_TEMPLATE} no text beside a call, so it got a message of its own"
TEXT_BESIDE: Final = f"{_TEMPLATE} no message between the user's and a call, so its text was put beside the call"
CALL_BESIDE_TEXT: Final = f"{_TEMPLATE} no text with a call, so the call and its result were given as text"
USERS: Final = f"{_TEMPLATE} no two messages of the user in a row, so they were joined"
ANSWERS: Final = f"{_TEMPLATE} no two messages of the assistant in a row, so they were joined"
USER_AFTER_RESULT: Final = f"{_TEMPLATE} no message of the user after a result, so it was joined with the result"
ANSWER_FIRST: Final = f"{_TEMPLATE} no answer first, so a message '{OPENING}' of the user was put before it"


def call_text(name: str, arguments: str) -> str:
    """A call as text. `arguments`: JSON."""
    return f"[call of {name}: {arguments}]"


def fit_messages(
    messages: Sequence[Message], rules: TemplateRules, *, write_call: WriteCall = call_text
) -> tuple[Sequence[Message], Sequence[str]]:
    """Return the messages in a shape that the template reads, and a warning for each kind of change.

    `messages` are not changed; if the template reads all shapes they are returned themselves. Calls without content,
    and ids of calls, get the form that the template reads, without a warning. `write_call`: for calls that become text.
    """
    if rules.takes_all:
        return messages, ()
    fitting = _Fitting(rules, write_call)
    messages = fitting.joined(messages, fitting.joins_with_call)
    for change in (fitting.calls, fitting.systems, fitting.opening):
        messages = list(change(messages))
    messages = fitting.joined(messages, fitting.joins)
    if not rules.any_ids:
        messages = list(_with_short_ids(messages))
    return messages, list(fitting.warnings)


def with_blank_line(first: Content | None, second: Content | None) -> Content:
    """The contents with a blank line between them. Parts stay parts."""
    if not first or not second:
        return first or second or ""
    if isinstance(first, str) and isinstance(second, str):
        return first + _GAP + second
    *before, last = _parts(first)
    ends = [{**last, "text": last["text"] + _GAP}] if "text" in last else [last, *text_part(_GAP)]
    return [*before, *ends, *_parts(second)]


class _Fitting:
    """The changes of one conversation, in the order of the methods. `warnings`: of those that were made."""

    def __init__(self, rules: TemplateRules, write_call: WriteCall) -> None:
        self.warnings: dict[str, None] = {}
        self._rules = rules
        self._write_call = write_call

    def joined(self, messages: Sequence[Message], joins: Callable[[Message, Message], str]) -> list[Message]:
        """Join neighbours for which `joins` returns a warning."""
        fitted: list[Message] = []
        for message in messages:
            if fitted and (warning := joins(fitted[-1], message)):
                self._warn(warning)
                fitted[-1] = _joined(fitted[-1], message)
            else:
                fitted.append(message)
        return fitted

    def joins_with_call(self, last: Message, message: Message) -> str:
        """For an assistant's text and the call that follows it, unless they may be two messages."""
        may_follow = self._rules.text_before_calls or not _is_answer(last) or not message.get("tool_calls")
        return "" if may_follow else TEXT_BESIDE

    def joins(self, last: Message, message: Message) -> str:
        """For messages that cannot follow each other."""
        rules = self._rules
        match last["role"], message["role"]:
            case "user", "user" if not rules.users:
                return USERS
            case "tool", "user" if not rules.user_after_result:
                return USER_AFTER_RESULT
            case "assistant", "assistant" if not rules.answers and _is_answer(last) and _is_answer(message):
                return ANSWERS
        return ""

    def calls(self, messages: Sequence[Message]) -> Iterator[Message]:
        """Fit calls, and their results, which are the tools' messages up to the next message of the assistant."""
        start = 0
        while start < len(messages):
            message, end = messages[start], start + 1
            if message.get("tool_calls"):
                while end < len(messages) and messages[end]["role"] != "assistant":
                    end += 1
                yield from self._turn(message, messages[start + 1 : end], is_last=end == len(messages))
            elif message["role"] == "tool" and not self._rules.calls:
                self._warn(NO_CALLS)
                yield _result_as_text(message)
            else:
                yield message
            start = end

    def systems(self, messages: Sequence[Message]) -> Iterator[Message]:
        """Fit the system messages at the start, and those after other messages."""
        rules = self._rules
        num_first = next((i for i, each in enumerate(messages) if role_of(each) != "system"), len(messages))
        first = messages[:num_first]
        if first and not rules.system:
            self._warn(NO_SYSTEM)
            first = [{**message, "role": "user"} for message in first]
        elif len(first) > 1 and not rules.several_system:
            self._warn(ONE_SYSTEM)
            first = [reduce(_joined, first)]
        if first and rules.system and not rules.system_alone and num_first == len(messages):
            self._warn(ONLY_SYSTEM)
            first = [{**message, "role": "user"} for message in first]
        yield from first
        for message in messages[num_first:]:
            if role_of(message) == "system" and not rules.later_system:
                self._warn(LATER_SYSTEM)
                message = _as_reminder(message)
            yield message

    def opening(self, messages: Sequence[Message]) -> Iterator[Message]:
        """Put a user's message before an answer that comes first."""
        first = next((index for index, each in enumerate(messages) if role_of(each) != "system"), None)
        for index, message in enumerate(messages):
            if index == first and message["role"] == "assistant" and not self._rules.answer_first:
                self._warn(ANSWER_FIRST)
                yield {"role": "user", "content": OPENING}
            yield message

    def _turn(self, message: Message, rest: Sequence[Message], *, is_last: bool) -> Iterator[Message]:
        """Fit an assistant's message with calls and those up to its next one. Calls that are given as text, and those
        that need a message of their own, divide it."""
        groups = self._groups(message, _by_call(message["tool_calls"], rest), rest, is_last=is_last)
        content: Content | None = message.get("content")
        others = {name: value for name, value in message.items() if name not in ("content", "tool_calls")}
        for group in groups:
            if group.is_text:
                yield {**others, "content": with_blank_line(content, "\n".join(map(self._call_text, group.calls)))}
                yield from (_result_as_text(each, group.calls) for each in group.rest)
            else:
                if content and not self._takes_text(message):
                    self._warn(TEXT_APART)
                    yield {"role": "assistant", "content": content}
                    content = None
                yield {**others, "content": self._beside_call(content), "tool_calls": group.calls}
                yield from group.rest
            # The first message has the text and the reasoning.
            content = None
            others = {name: value for name, value in others.items() if name not in REASONING_FIELDS}

    def _groups(
        self, message: Message, by_call: Sequence[Sequence[Message]], rest: Sequence[Message], *, is_last: bool
    ) -> Sequence["_Group"]:
        """Divide a message's calls. `by_call`: `rest`, the messages that follow, for each call."""
        calls, rules = message["tool_calls"], self._rules
        as_text = [self._is_open(each, rest, is_last=is_last) for each in by_call]
        if not rules.calls:
            self._warn(NO_CALLS)
            as_text = [True] * len(calls)
        elif not rules.text_before_calls and (
            len(set(as_text)) > 1 or (message.get("content") and not self._takes_text(message))
        ):
            self._warn(CALL_BESIDE_TEXT)
            as_text = [True] * len(calls)
        elif any(as_text):
            self._warn(OPEN_CALL)
        elif len(calls) > 1 and not rules.several_calls:
            self._warn(ONE_CALL)
        groups: list[_Group] = []
        for call, follows, is_text in zip(calls, by_call, as_text, strict=True):
            if groups and groups[-1].is_text == is_text and (is_text or rules.several_calls):
                groups[-1] = _Group([*groups[-1].calls, call], [*groups[-1].rest, *follows], is_text)
            else:
                groups.append(_Group([call], follows, is_text))
        # One group keeps the order of the results, which need not be that of the calls.
        return groups if len(groups) > 1 else [_Group(calls, rest, as_text[0])]

    def _is_open(self, follows: Sequence[Message], rest: Sequence[Message], *, is_last: bool) -> bool:
        """Whether a call has no result, and the template does not read it so. `follows`: the messages of this call."""
        if any(each["role"] == "tool" for each in follows):
            return False
        if is_last:  # its result may follow, unless the user has gone on
            return not self._rules.open_calls and any(each["role"] != "tool" for each in rest)
        return not self._rules.open_calls or (not rest and not self._rules.answers)

    def _takes_text(self, message: Message) -> bool:
        """Whether the template reads the text of a message with calls."""
        has_thought = any(message.get(name) for name in REASONING_FIELDS)
        return self._rules.thought_text_with_calls if has_thought else self._rules.text_with_calls

    def _beside_call(self, content: Content | None) -> Content | None:
        if content:
            return content
        if self._rules.null_content and self._rules.empty_content:
            return content
        return None if self._rules.null_content else ""

    def _call_text(self, call: Mapping[str, Any]) -> str:
        arguments = call["function"].get("arguments") or {}
        # The gateway's are mappings that know the text that was sent.
        text = json.dumps(arguments, ensure_ascii=False) if type(arguments) is dict else str(arguments)
        return self._write_call(call["function"]["name"], text)

    def _warn(self, warning: str) -> None:
        self.warnings[warning] = None


@dataclass(frozen=True, slots=True)
class _Group:
    """Calls that stay in one message, and the messages that follow it."""

    calls: Sequence[Mapping[str, Any]]
    rest: Sequence[Message]
    is_text: bool


def _by_call(calls: Sequence[Mapping[str, Any]], rest: Sequence[Message]) -> list[list[Message]]:
    """Return the messages that follow each call: its result and what comes before the next result. What follows the
    last result belongs to the last call. A result is that of the call with its id, or else of the first without one."""
    by_call: list[list[Message]] = [[] for _ in calls]
    ids = [call.get("id") for call in calls]
    open_calls = list(range(len(calls)))
    owner, num_results = 0, max((i for i, each in enumerate(rest, 1) if each["role"] == "tool"), default=0)
    for message in rest[:num_results]:
        if message["role"] == "tool" and open_calls:
            named = [index for index in open_calls if ids[index] == message.get("tool_call_id")]
            owner = (named or open_calls)[0]
            open_calls.remove(owner)
        by_call[owner].append(message)
    by_call[-1] += rest[num_results:]
    return by_call


def _result_as_text(message: Message, calls: Sequence[Mapping[str, Any]] = ()) -> Message:
    """A tool's message as the user's, with its name or that of its call. Other messages stay."""
    if message["role"] != "tool":
        return message
    names = {call.get("id"): call["function"]["name"] for call in calls}
    name = message.get("name") or names.get(message.get("tool_call_id"), "a tool")
    others = {key: value for key, value in message.items() if key not in ("name", "tool_call_id")}
    return {**others, "role": "user", "content": _around(f"[result of {name}]\n", message.get("content"))}


def _with_short_ids(messages: Sequence[Message]) -> Iterator[Message]:
    """Number the ids of calls, in nine letters and digits."""
    short: dict[str, str] = {}
    for message in messages:
        if calls := message.get("tool_calls"):
            for call in calls:
                short[call.get("id", "")] = f"call{len(short):05}"
            message = {**message, "tool_calls": [{**call, "id": short[call.get("id", "")]} for call in calls]}
        elif message["role"] == "tool":
            message = {**message, "tool_call_id": short.get(message.get("tool_call_id", ""), f"call{len(short):05}")}
        yield message


def _is_answer(message: Message) -> bool:
    return message["role"] == "assistant" and not message.get("tool_calls")


def _as_reminder(message: Message) -> Message:
    before, after = REMINDER
    return {**message, "role": "user", "content": _around(before, message.get("content"), after)}


def _joined(first: Message, second: Message) -> Message:
    """The first one with the text, the reasoning and the calls of the second."""
    joined = {**first, "content": with_blank_line(first.get("content"), second.get("content"))}
    if calls := second.get("tool_calls"):
        joined["tool_calls"] = calls
    for name in REASONING_FIELDS:
        if thought := second.get(name):
            joined[name] = _GAP.join([*filter(None, [first.get(name)]), thought])
    return joined


def _around(before: str, content: Content | None, after: str = "") -> Content:
    """The content between two texts."""
    if isinstance(content, str) or not content:
        return f"{before}{content or ''}{after}"
    return [*text_part(before), *content, *(text_part(after) if after else ())]


def _parts(content: Content) -> Sequence[Mapping[str, Any]]:
    return text_part(content) if isinstance(content, str) else content
