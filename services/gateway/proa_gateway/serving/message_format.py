"""The formats in which models write reasoning and tool calls: which one a model has, how a request uses it, and what
it demands of the output.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from weakref import WeakKeyDictionary

from proa_gateway.engines.models import ServedModel
from proa_gateway.parsing.call_reader import Schemas
from proa_gateway.parsing.choose import choose_format
from proa_gateway.parsing.compiled_format import CompiledFormat, compile_format
from proa_gateway.parsing.format import ToolFormat
from proa_gateway.parsing.grammars.message import Reasoning
from proa_gateway.parsing.json_formats import HERMES
from proa_gateway.parsing.known_formats import KnownFormats
from proa_gateway.parsing.parser import ResponseParser
from proa_gateway.serving.tools.tool import Tool
from proa_gateway.serving.written_call import written_call
from proa_gateway.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """How the outputs of one request are parsed."""

    compiled: CompiledFormat
    schemas: Schemas  # of the request's tools
    reasoning: Reasoning  # whether the prompt ends within it
    parallel_calls: bool  # a message may have more than one call
    constrains_content: bool = False
    """The content must match a grammar, to which the whitespace after reasoning does not belong."""

    @property
    def markers(self) -> frozenset[int]:
        return frozenset(self.compiled.markers)

    def parser(self) -> ResponseParser:
        """A parser for one output."""
        # The grammar allows that whitespace also if the model does not reason (grammar.py).
        drops_space = self.constrains_content and self.reasoning is Reasoning.OPTIONAL
        reasoning_open = self.reasoning is Reasoning.OPEN
        return ResponseParser(self.compiled, self.schemas, reasoning_open=reasoning_open, drops_space=drops_space)


class ModelFormat:
    """A tool format for one model's tokenizer. `has_calls`: whether its part about calls is the model's."""

    def __init__(self, tool_format: ToolFormat, tokenizer: Tokenizer, *, has_calls: bool = True) -> None:
        self.tool_format = tool_format
        self.has_calls = has_calls
        self._added_tokens = tokenizer.added_tokens

    def for_request(
        self, tools: Sequence[Tool], reasoning: Reasoning, *, parallel_calls: bool, constrains_content: bool = False
    ) -> MessageFormat:
        compiled = self._with_calls if tools else self._without_calls
        schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}
        return MessageFormat(compiled, schemas, reasoning, parallel_calls, constrains_content)

    def reasoning_after(self, generation_prompt: str) -> Reasoning:
        """`generation_prompt`: the end of the prompt, which the chat template adds for the answer. The rest of the
        prompt is ignored, since users may write anything."""
        if self.tool_format.reasoning is None:
            return Reasoning.CLOSED
        opened, closed = (generation_prompt.rfind(text.strip()) for text in self.tool_format.reasoning)
        if opened > closed:
            return Reasoning.OPEN
        return Reasoning.OPTIONAL if closed < 0 else Reasoning.CLOSED

    @cached_property
    def _with_calls(self) -> CompiledFormat:
        return compile_format(self.tool_format, self._added_tokens, calls=True)

    @cached_property
    def _without_calls(self) -> CompiledFormat:
        return compile_format(self.tool_format, self._added_tokens, calls=False)


@dataclass(frozen=True, slots=True)
class _Found:
    """The formats of one model. `known`: None if it is not known."""

    known: ModelFormat | None
    for_tools: ModelFormat  # `known`, or Hermes' form of calls


class MessageFormats:
    """The format of each model, one of `known`.

    `tool_call_parser` and `reasoning_parser`: names of formats for all models, in place of the one that a model's chat
    template shows. Raises `ValueError` for names that `known` does not have.
    """

    def __init__(
        self, known: KnownFormats, tool_call_parser: str | None = None, reasoning_parser: str | None = None
    ) -> None:
        known.check(tool_call_parser, reasoning_parser)
        self._known, self._name = known, tool_call_parser
        self._reasoning_name = reasoning_parser  # None: that of the chosen format
        self._found: WeakKeyDictionary[Tokenizer, _Found] = WeakKeyDictionary()

    def of(self, model: ServedModel) -> ModelFormat | None:
        """Return the model's format. None if it is not known: outputs are then not parsed."""
        return self._of(model).known

    def for_tools(self, model: ServedModel) -> ModelFormat:
        """Return the format of requests with tools. If that of the model's calls is not known, it is Hermes'."""
        return self._of(model).for_tools

    def prepare(self, name: str, tokenizer: Tokenizer) -> None:
        """Find the format of a model, called `name` in the log, which renders its chat template. Not on an event
        loop."""
        known = self._make(name, tokenizer)
        unknown = ModelFormat(replace(HERMES, reasoning=None), tokenizer, has_calls=False)
        self._found[tokenizer] = _Found(known, known or unknown)

    def _of(self, model: ServedModel) -> _Found:
        if model.tokenizer not in self._found:
            self.prepare(model.name, model.tokenizer)
        return self._found[model.tokenizer]

    def _make(self, name: str, tokenizer: Tokenizer) -> ModelFormat | None:
        written = written_call(tokenizer)
        choice = choose_format(
            self._name,
            tokenizer.response_template,
            tokenizer.tool_template_source,
            self._known,
            lambda tool_format: written is None or written.is_read_by(tool_format),
        )
        if choice.unread:
            _log.warning("the chat template of %s writes calls that the format %s does not read", name, choice.unread)
        chosen = choice.tool_format
        if self._reasoning_name is None:
            return ModelFormat(chosen, tokenizer) if chosen is not None else None
        reasoning = self._known.reasoning_format(self._reasoning_name)
        if chosen is None and reasoning is None:
            return None
        tool_format = replace(chosen or HERMES, reasoning=reasoning)
        return ModelFormat(tool_format, tokenizer, has_calls=chosen is not None)
