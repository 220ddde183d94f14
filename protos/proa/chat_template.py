"""Chat templates: messages to one prompt text.

A template is a Jinja program that comes with the model, so it runs in a sandbox (`template_sandbox.py`) and within a
budget of time and size (`template_budget.py`).
What a template reads is found by rendering (`template_rules.py`).
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Final

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.meta import TrackingCodeGenerator
from jinja2.parser import Parser

from proa.template_budget import Budget, TemplateTooCostly, concat, current
from proa.template_guards import add_guards
from proa.template_rules import (
    EFFORTS,
    TEXT,
    Content,
    ContentForms,
    Message,
    TemplateRules,
    content_forms,
    find_rules,
    text_part,
)
from proa.template_sandbox import TemplateEnvironment
from proa.tokenizer_files import CHAT_TEMPLATE_FILE

_CONFIG_FIELD: Final = "tokenizer_config.json: chat_template"
MAX_SOURCE: Final = 2**17
"""Characters of a template. The longest published ones have 40,000."""
MAX_NODES: Final = 10_000
"""Of a template's syntax tree. The longest published ones have 1,400; compiling so many takes one to three seconds."""
_MAX_ERROR = 1000  # characters
_MAX_DATE = 100  # characters of a date's layout
# Appended to a message that is to be continued; the prompt ends where the template writes it. The space shows whether
# the template strips messages.
_MARK = "\ue000continue\ue000 "


def marked(content: Content) -> Content:
    """The content of a last message that is to be continued, for `cut_at_mark`. Parts are copied; the mark is appended
    to the last one of them, or comes after an image."""
    if isinstance(content, str):
        return content + _MARK
    *before, last = content or text_part("")
    if "text" not in last:
        return [*before, last, *text_part(_MARK)]
    return [*before, {**last, "text": last["text"] + _MARK}]


def cut_at_mark(text: str) -> str | None:
    """The prompt up to the end of the message that is continued. None: the template leaves out the last message."""
    end = text.rfind(_MARK.rstrip())
    if end < 0:
        return None
    return text[:end] if text.startswith(_MARK, end) else text[:end].rstrip()


class ChatTemplateError(ValueError):
    """The template does not compile, or rejects the messages; has its error message."""


class ChatTemplateTooCostly(ChatTemplateError):
    """Rendering takes more time or memory than its budget; has the reason."""


class _Stopped(Exception):
    """Questions about a template take more than a rendering may."""


class ChatTemplate:
    """A compiled template. `special_tokens`: `bos_token`, `eos_token`, …, which templates use by name."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str] | None = None) -> None:
        """Raises `ChatTemplateError` for a source that does not compile, or that is too long or costly to compile.

        `variables`: names that the template reads and does not always set itself. `tests_none`: whether it
        distinguishes null from other values. `seconds_per_message`: of the last rendering, whether it ended or was
        stopped.
        """
        if len(source) > MAX_SOURCE:
            raise ChatTemplateError(f"the chat template has more than {MAX_SOURCE:,} characters")
        environment = TemplateEnvironment([_GenerationTag], {"tojson": _to_json})
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        token = current.set(Budget())
        try:
            tree = environment.parse(source)
            if sum(1 for _ in tree.find_all(nodes.Node)) > MAX_NODES:
                raise TemplateTooCostly(f"it has more than {MAX_NODES} parts")
            self.variables = _undeclared_variables(tree, environment)
            self.tests_none = any(test.name == "none" for test in tree.find_all(nodes.Test))
            add_guards(tree)
            self._template = environment.from_string(tree)
            self._globals = dict(self._template.globals)  # those of a `Template` are slow to copy
        except (RecursionError, MemoryError) as error:  # Python's compiler raises this one
            raise ChatTemplateError("the chat template does not compile: it nests too deeply") from error
        except Exception as error:  # of Jinja, or of Python for what Jinja made of the template
            raise ChatTemplateError(f"the chat template does not compile: {_message(error)}") from error
        finally:
            current.reset(token)
        self._special_tokens = dict(special_tokens or {})
        self.seconds_per_message = 0.0

    @property
    def content_forms(self) -> Mapping[str, ContentForms]:
        """How it reads the contents of messages, by role."""
        return self._read[0]

    @property
    def rules(self) -> TemplateRules:
        """The shapes of conversations that it reads. All, if finding out takes more than a rendering may."""
        return self._read[1]

    @cached_property
    def _read(self) -> tuple[Mapping[str, ContentForms], TemplateRules]:
        budget = Budget()

        def render(messages: Sequence[Message], variables: Mapping[str, object]) -> str:
            try:
                return self.render(messages, variables, budget=budget)
            except ChatTemplateTooCostly as error:
                raise _Stopped from error

        forms: Mapping[str, ContentForms] = {"user": TEXT}
        try:
            forms = content_forms(render)
            return forms, find_rules(render, forms, variables=self.variables, keeps_null=self.tests_none)
        except _Stopped:
            return forms, TemplateRules(efforts=EFFORTS if "reasoning_effort" in self.variables else ())

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, object] | None = None,
        *,
        add_generation_prompt: bool = True,
        budget: Budget | None = None,
    ) -> str:
        """The prompt. `variables`: of the template (`enable_thinking`, …). `budget`: what it may use, or what is left
        of it after other renderings; None: one of its own. Raises `ChatTemplateError`, also if the template raises."""
        values = {**self._globals, **self._special_tokens, **(variables or {})}
        values |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        token = current.set(budget or Budget())
        started = time.perf_counter()
        try:
            text = concat(self._template.root_render_func(self._template.new_context(values, shared=True)))
            if not text.isascii():
                text.encode()  # raises for lone surrogates, which tokenizers do not take
            return text
        except TemplateTooCostly as error:
            raise ChatTemplateTooCostly(str(error)) from error
        except Exception as error:  # the template may raise anything for a client's values
            raise ChatTemplateError(_message(error)) from error
        finally:
            self.seconds_per_message = (time.perf_counter() - started) / (len(messages) or 1)
            current.reset(token)


def _undeclared_variables(tree: nodes.Template, environment: TemplateEnvironment) -> frozenset[str]:
    """`jinja2.meta.find_undeclared_variables`, without its optimizer."""
    generator = TrackingCodeGenerator(environment)
    generator.optimizer = None
    generator.visit(tree)
    return frozenset(generator.undeclared_identifiers)


def _message(error: Exception) -> str:
    return str(error)[:_MAX_ERROR] or type(error).__name__


def special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name from `tokenizer_config.json`, where each is a string or an object with `content`."""
    found: dict[str, str] = {}
    for name, value in tokenizer_config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def template_source(
    tokenizer_config: Mapping[str, Any], template_file: bytes | None, *, tools: bool = False
) -> str | None:
    """The template's source: `template_file` if given, else the configuration's, which may have several by name. Of
    several, the `default` one; with `tools` the one for `tool_use`, if there is one. Raises `ChatTemplateError`, whose
    sentence names the file."""
    if template_file is not None:
        try:
            return template_file.decode()
        except UnicodeDecodeError as error:
            raise ChatTemplateError(f"{CHAT_TEMPLATE_FILE} is not valid UTF-8: {error}") from error
    value = tokenizer_config.get("chat_template")
    if isinstance(value, list):  # as transformers 4 wrote them
        for index, entry in enumerate(value):
            if not isinstance(entry, dict) or not {"name", "template"} <= entry.keys():
                raise ChatTemplateError(f"{_CONFIG_FIELD}[{index}] must be an object with a name and a template")
        value = {str(entry["name"]): entry["template"] for entry in value}
    if isinstance(value, dict):
        value = value.get("tool_use" if tools else "default", value.get("default"))
    if value is None or isinstance(value, str):
        return value
    raise ChatTemplateError(f"{_CONFIG_FIELD} must be a text, or texts by name, not {json.dumps(value)[:40]}")


@dataclass(frozen=True, slots=True)
class ModelTemplates:
    """A model's templates, for chats with and without tools. `error`: why it has none that can be used, as a sentence
    that names the file; empty: there is none, or there are."""

    plain: ChatTemplate | None = None
    tools: ChatTemplate | None = None
    tool_source: str = ""
    source: str = ""
    error: str = ""


def read_templates(tokenizer_config: Mapping[str, Any], template_file: bytes | None) -> ModelTemplates:
    """Compile the templates in a model's files. A model without one that works can do all but chat."""
    names = special_tokens(tokenizer_config)
    place = CHAT_TEMPLATE_FILE if template_file is not None else _CONFIG_FIELD
    try:
        source = template_source(tokenizer_config, template_file)
        tool_source = template_source(tokenizer_config, template_file, tools=True)
    except ChatTemplateError as error:
        return ModelTemplates(error=str(error))
    try:
        plain = ChatTemplate(source, special_tokens=names) if source else None
        is_one = tool_source == source or not tool_source
        tools = plain if is_one or not tool_source else ChatTemplate(tool_source, special_tokens=names)
    except ChatTemplateError as error:
        return ModelTemplates(error=f"{place}: {error}")
    return ModelTemplates(plain, tools, tool_source or "", source or "")


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; in a prompt it renders its contents."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The `tojson` filter as in transformers; Jinja's own escapes HTML."""
    if not ensure_ascii and indent is None and separators is None and not sort_keys:
        return _encode(value)  # making an encoder takes longer than a small value
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return encoder.encode(value) if indent is None else concat(encoder.iterencode(value))


_encode = json.JSONEncoder(ensure_ascii=False).encode


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    if len(layout) > _MAX_DATE:
        raise TemplateError(f"the date's layout has more than {_MAX_DATE} characters")
    return datetime.now().strftime(layout)
