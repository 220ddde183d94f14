"""What a chat template reads: forms of contents, and shapes of conversations.

Both are found by rendering short conversations of made-up words, so they do not depend on how a template is written. A
template reads a shape if all words arrive in the prompt, in their order. vLLM looks for loops over `message.content` in
the syntax tree (`--chat-template-content-format auto`), and has nothing for shapes.

`fit_messages.py` changes conversations by these rules.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

Message = Mapping[str, Any]
Content = str | Sequence[Mapping[str, Any]]
Render = Callable[[Sequence[Message], Mapping[str, object]], str]
"""Messages and variables to the prompt. May raise any `ValueError`."""

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of `reasoning_effort`, ascending."""
SCALE: Final = ("low", "medium", "high")
"""Of a template that writes the effort into the prompt as a word."""
THINKING_SWITCHES: Final = ("enable_thinking", "thinking")
"""Variables of chat templates that switch reasoning on or off."""
REASONING_FIELDS: Final = ("reasoning_content", "reasoning", "thinking")
"""Names of an assistant's reasoning. Clients send one of them; templates read one of them."""

_NO_EFFORT = "proaeffort"  # which no template knows
_SYSTEM, _SECOND_SYSTEM, _LATER_SYSTEM = "proasystem", "proasecond", "proalater"
_USER, _SECOND_USER, _LAST_USER = "proauser", "proathen", "proalast"
_ANSWER, _SECOND_ANSWER, _THOUGHT = "proaanswer", "proamore", "proathought"
_PARTS = ("proawordone", "proawordtwo")
_NAMES, _VALUES, _RESULTS = ("proatool", "proatask"), ("proaone", "proatwo"), ("proayes", "proahence")
_SHORT_IDS = ("abcdefghi", "bcdefghij")  # the only form that Mistral's templates take
_LONG_IDS = ("call_0123456789abcdefgh", "call_123456789abcdefghi")  # as servers make them


@dataclass(frozen=True, slots=True)
class ContentForms:
    """The forms of a message's content that a template reads. `parts`: any number of objects with a `type`, texts
    `{"type": "text", "text": …}` among them. Neither: a list of one part."""

    text: bool
    parts: bool


TEXT = ContentForms(text=True, parts=False)
PARTS = ContentForms(text=False, parts=True)
ONE_PART = ContentForms(text=False, parts=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateRules:
    """The shapes of conversations that a chat template reads. The default: all."""

    system: bool = True
    """A system message first."""
    several_system: bool = True
    later_system: bool = True
    """A system message after others."""
    system_alone: bool = True
    """A system message, and no other."""
    users: bool = True
    """Messages of the user in a row."""
    answers: bool = True
    """Messages of the assistant in a row."""
    answer_first: bool = True
    calls: bool = True
    """Calls of tools and their results."""
    null_content: bool = True
    """A call without content."""
    empty_content: bool = True
    """A call with the content `""`."""
    any_ids: bool = True
    """Ids of calls in any form. Otherwise nine letters and digits, as Mistral's templates demand."""
    several_calls: bool = True
    """Two calls in a message."""
    text_with_calls: bool = True
    thought_text_with_calls: bool = True
    """Reasoning, text and a call in one message."""
    text_before_calls: bool = True
    """Text, then a call, as two messages."""
    user_after_result: bool = True
    open_calls: bool = True
    """A call without a result, before a message of the user."""
    efforts: Sequence[str] = field(default=(), compare=False)
    """Those of `EFFORTS` that the template accepts; none: it reads no effort."""

    @property
    def takes_all(self) -> bool:
        """Whether the template reads every conversation as it is."""
        return self == _TAKES_ALL


_TAKES_ALL = TemplateRules()


def content_forms(render: Render) -> dict[str, ContentForms]:
    """Return the forms of content that the template reads, by role. A role whose messages it refuses or leaves out has
    text."""
    user = _forms(render, lambda content: [{"role": "user", "content": content}])
    question = {"role": "user", "content": "question" if user.text else text_part("question")}
    answer = _forms(render, lambda content: [question, {"role": "assistant", "content": content}, question])
    call = {"role": "assistant", "content": "" if answer.text else text_part(""), "tool_calls": _calls(1, _SHORT_IDS)}
    result = {"role": "tool", "tool_call_id": _SHORT_IDS[0], "name": _NAMES[0]}
    return {
        "user": user,
        "system": _forms(render, lambda content: [{"role": "system", "content": content}, question]),
        "assistant": answer,
        "tool": _forms(render, lambda content: [question, call, {**result, "content": content}]),
    }


def text_part(text: str) -> list[dict[str, str]]:
    """A list of one part."""
    return [{"type": "text", "text": text}]


def text_of(content: str | Sequence[Message] | None) -> str:
    """Texts of parts are joined with newlines."""
    if isinstance(content, str) or content is None:
        return content or ""
    return "\n".join(part["text"] for part in content if "text" in part)


def role_of(message: Message) -> str:
    role: str = message["role"]
    return "system" if role == "developer" else role  # OpenAI's newer name


def messages_as_read(
    messages: Sequence[Message],
    forms: Mapping[str, ContentForms],
    *,
    placeholder: str = "",
    keeps_null: bool = False,
) -> list[dict[str, Any]]:
    """Copies of the messages, with contents in forms that the template reads, and the role `system` for `developer`.

    `forms`: by role; other roles are as the user's. `placeholder`: of images or audios, for templates that read text.
    `keeps_null`: a message of calls alone has a content, which is None; else it has none, as in transformers.
    """
    read = []
    for message in messages:
        role, content = role_of(message), message.get("content")
        copy = {**message, "role": role}
        if content is not None or not message.get("tool_calls"):
            copy["content"] = _as_read(content, forms.get(role, forms["user"]), placeholder)
        elif keeps_null:
            copy["content"] = None
        else:
            copy.pop("content", None)
        read.append(copy)
    return read


def find_rules(
    render: Render, forms: Mapping[str, ContentForms], *, variables: frozenset[str], keeps_null: bool
) -> TemplateRules:
    """Render at most 30 conversations. `variables`: those that the template reads. `keeps_null`: as for
    `messages_as_read`. A question that another answer makes needless has the answer yes, such as `several_calls`
    without `calls`. A template that leaves out a user's only message has no rules: nothing can be found out about it.
    """

    def reads(*messages: Message) -> bool:
        try:
            text = render(messages_as_read(messages, forms, keeps_null=keeps_null), {})
        except ValueError:
            return False
        position = 0
        for word in _words(messages):
            position = text.find(word, position)
            if position < 0:
                return False
            position += len(word)
        return True

    efforts = _efforts(render, forms, variables) if "reasoning_effort" in variables else ()
    user, then, last = _user(_USER), _user(_SECOND_USER), _user(_LAST_USER)
    system, answer = _system(_SYSTEM), _answer(_ANSWER)
    result, next_result = _result(0), _result(1)
    users = reads(user, then, answer, last)
    if not users and not reads(user):
        return TemplateRules(efforts=efforts)
    null_content = reads(user, _call(None), result)
    empty_content = reads(user, _call(""), result)
    bare = _call(None if null_content else "")
    calls = (null_content or empty_content) and reads(user, bare, result, _answer(_ANSWER), last)
    with_text, second = _call(_ANSWER), _system(_SECOND_SYSTEM)
    # Some templates write it before the last message of the user, or not at all after a result.
    has_system = reads(system, user, answer, then) and (not calls or reads(system, user, bare, result))
    later = _system(_LATER_SYSTEM)
    return TemplateRules(
        system=has_system,
        several_system=not has_system or reads(system, second, later, user),  # one takes two, and no third
        later_system=has_system
        and reads(system, user, later)
        and reads(user, later, then)
        and reads(system, user, later, answer, then)
        and reads(system, user, answer, later, then)
        and (not calls or reads(system, user, bare, result, later)),
        system_alone=not has_system or reads(system),
        users=users,
        answers=reads(user, answer, _answer(_SECOND_ANSWER), then),
        answer_first=reads(answer, user),
        calls=calls,
        null_content=null_content or not calls,
        empty_content=empty_content or not calls,
        any_ids=not calls or reads(user, {**bare, "tool_calls": _calls(1, _LONG_IDS)}, _result(0, _LONG_IDS)),
        several_calls=not calls or reads(user, _call(bare["content"], 2), result, next_result),
        text_with_calls=not calls or reads(user, with_text, result),
        thought_text_with_calls=not calls
        or reads(user, {**with_text, **dict.fromkeys(REASONING_FIELDS, _THOUGHT)}, result),
        text_before_calls=not calls or reads(user, answer, bare, result),
        user_after_result=not calls or reads(user, bare, result, last),
        open_calls=not calls or reads(user, bare, last),
        efforts=efforts,
    )


def nearest_effort(effort: str, accepted: Sequence[str]) -> str | None:
    """Return the accepted effort that is nearest, of two as near the higher one. Only `none` itself becomes `none`.
    None: there is none."""
    if effort in accepted:
        return effort
    asked = EFFORTS.index(effort)
    levels = [EFFORTS.index(level) for level in accepted if level != "none"]
    nearest = min(levels, key=lambda level: (abs(level - asked), -level), default=None)
    return None if nearest is None else EFFORTS[nearest]


def _efforts(render: Render, forms: Mapping[str, ContentForms], variables: frozenset[str]) -> Sequence[str]:
    """The accepted efforts of a template that reads `reasoning_effort`."""
    messages = messages_as_read([_user(_USER)], forms)

    def rendered(effort: str) -> str | None:
        switches = variables.intersection(THINKING_SWITCHES) if effort == "none" else ()
        try:
            return render(messages, {"reasoning_effort": effort, **dict.fromkeys(switches, False)})
        except ValueError:
            return None

    text = rendered(_NO_EFFORT)
    if text is None:
        return tuple(effort for effort in EFFORTS if rendered(effort) is not None)
    return SCALE if _NO_EFFORT in text.lower() else EFFORTS


def _forms(render: Render, messages: Callable[[Content], Sequence[Message]]) -> ContentForms:
    def rendered(content: Content) -> str:
        try:
            return render(messages(content), {})
        except ValueError:
            return ""

    text = _PARTS[0] in rendered(_PARTS[0])
    written = rendered([part for word in _PARTS for part in text_part(word)])
    # A template that takes every content for text writes the list as Python or as JSON.
    parts = all(_is_plain(word, written) for word in _PARTS)
    if text or parts:
        return ContentForms(text, parts)
    if _is_plain(_PARTS[0], rendered(text_part(_PARTS[0]))):
        return ONE_PART
    # Qwen3-ASR's leaves out all texts of the user and writes the audios.
    return TEXT if rendered([{"type": "audio", "audio": ""}]) in ("", rendered(_PARTS[0])) else PARTS


def _is_plain(word: str, text: str) -> bool:
    return word in text and f"{word}'" not in text and f'{word}"' not in text


def _as_read(content: Content | None, forms: ContentForms, placeholder: str) -> Content:
    """The content in a form that the template reads: that in which it was sent, if possible.

    Templates write an image's placeholder for a part of the type `image`, an audio's for `audio`. Without parts,
    `placeholder` comes before the text, once for each image or audio and on lines of their own, as in vLLM.
    """
    if not isinstance(content, str) and content is not None and forms.parts:
        return content
    text = text_of(content)
    if not isinstance(content, str) and content is not None:
        media = [placeholder for part in content if part.get("type") in ("image", "audio")]
        text = "\n".join([*media, text] if text else media) if media else text
    return text if forms.text else text_part(text)


def _words(messages: Sequence[Message]) -> Iterator[str]:
    """The words of the messages that a prompt must have. Templates may leave out reasoning."""
    for message in messages:
        if message["content"]:
            yield message["content"]
        for call in message.get("tool_calls", ()):
            yield call["function"]["name"]
            yield from call["function"]["arguments"].values()


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def _answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _call(content: str | None, count: int = 1) -> Message:
    return {"role": "assistant", "content": content, "tool_calls": _calls(count, _SHORT_IDS)}


def _calls(count: int, ids: Sequence[str]) -> list[dict[str, Any]]:
    functions = [{"name": name, "arguments": {"key": value}} for name, value in zip(_NAMES, _VALUES, strict=True)]
    return [{"id": ids[i], "type": "function", "function": functions[i]} for i in range(count)]


def _result(index: int, ids: Sequence[str] = _SHORT_IDS) -> Message:
    return {"role": "tool", "tool_call_id": ids[index], "name": _NAMES[index], "content": _RESULTS[index]}
