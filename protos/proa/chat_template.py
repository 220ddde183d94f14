"""The model's own chat template: messages in, one prompt text out.

Templates are programs that came with a model, so they run in a sandbox. Knows nothing of tokens or requests.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]


class ChatTemplateError(ValueError):
    """The template does not take these messages; says why in its own words."""


class ChatTemplate:
    """Compiled once. `special_tokens` (`bos_token`, `eos_token`, …) are visible to the template by name."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str] | None = None) -> None:
        """Raises `ChatTemplateError` for a source that does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ChatTemplateError(f"the model's chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens or {})

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, object] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt. `variables` are the template's own (`enable_thinking`, …). Raises `ChatTemplateError`."""
        values = {**self._special_tokens, **(variables or {})}
        values |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(values)
        except Exception as error:  # a model's program, over a client's values: it may fail in any way
            raise ChatTemplateError(str(error) or type(error).__name__) from error


def special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens of a `tokenizer_config.json`, where each is a text or an object with `content`."""
    found: dict[str, str] = {}
    for name, value in tokenizer_config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def template_source(tokenizer_config: Mapping[str, Any], template_file: bytes | None) -> str | None:
    """The template's text: its own file first, else the configuration's, of several the one named `default`."""
    if template_file is not None:
        return template_file.decode()
    value = tokenizer_config.get("chat_template")
    if isinstance(value, list):
        value = {entry["name"]: entry["template"] for entry in value}.get("default")
    return value if isinstance(value, str) else None


class _GenerationTag(Extension):
    """`{% generation %}` marks what a model said, for training; to a prompt it is only its contents."""

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
    """JSON as templates expect it: jinja2's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
