"""What a request demands of its outputs, as the grammar that engines enforce.

The content may have to match a `Constraint`; the form of a message demands calls, certain ones, and reasoning before
them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from proa.contract import Grammar
from proa.grammar import GrammarError, Lowered, check
from proa_gateway.engines.models import ServedModel
from proa_gateway.engines.pool import EnginePool
from proa_gateway.errors import InvalidRequest, UnsupportedField
from proa_gateway.parsing.format import FunctionTool, TextGrammar, ToolChoice, ToolFormat
from proa_gateway.parsing.grammars.message import Reasoning, answer_grammar, reasoning_grammar, tool_grammar
from proa_gateway.serving.grammars import Grammars
from proa_gateway.serving.structured_outputs import Constraint
from proa_gateway.serving.tools.tool import Tool
from proa_gateway.tokenizer import Tokenizer

BUDGET = "thinking_token_budget"
NO_BUDGET = f"{BUDGET} needs a model whose reasoning begins and ends with tokens of its own, and is separated."


@dataclass(frozen=True, slots=True)
class MessageConstraint:
    """`tools`: those that the model may call. `thinking_token_budget`: of its reasoning; None: no bound."""

    tool_format: ToolFormat
    tools: Sequence[Tool]
    choice: ToolChoice  # never "none": `tools` is empty then
    parallel_calls: bool  # a message may have more than one call
    reasoning: Reasoning  # whether the prompt ends within it
    thinking_token_budget: int | None = None

    @property
    def constrains(self) -> bool:
        """Whether it constrains an answer that nothing else constrains."""
        return self.thinking_token_budget is not None or self.constrains_calls

    @property
    def constrains_calls(self) -> bool:
        return bool(self.tools) and (self.choice != "auto" or any(tool.is_enforced for tool in self.tools))

    @property
    def param(self) -> str:
        """The request's field, for errors."""
        if self.thinking_token_budget is not None and not self.constrains_calls:
            return BUDGET
        return "tools" if self.choice == "auto" else "tool_choice"


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """`content`: of the content. `message`: of the form; None: all output is content. One of them constrains."""

    content: Constraint | None
    message: MessageConstraint | None = None

    @property
    def param(self) -> str | None:
        """The request's field, for errors."""
        if self.content is not None:
            return self.content.param
        return self.message.param if self.message is not None else None


@dataclass(frozen=True, slots=True)
class MessageGrammarKey:
    """The grammar of a message, as a key of `Grammars`. `answer`: of the content."""

    tool_format: ToolFormat
    tools: str  # names, schemas, whether they are strict, and grammars of inputs, as JSON
    choice: ToolChoice
    parallel_calls: bool
    reasoning: Reasoning
    answer: Grammar | None
    tokenizer: Tokenizer  # its added tokens are terminals of the grammar
    max_reasoning_tokens: int | None  # None: no bound, or the prompt has closed the reasoning

    @classmethod
    def of(cls, message: MessageConstraint, answer: Grammar | None, tokenizer: Tokenizer) -> "MessageGrammarKey":
        """Raises `GrammarError` for schemas that are nested too deeply."""
        tools = [
            (each.function.name, each.function.parameters or {}, each.is_enforced, _fields(each.grammar))
            for each in message.tools
        ]
        try:
            as_json = json.dumps(tools)
        except RecursionError:
            raise GrammarError("the parameters are nested too deeply") from None
        is_closed = message.reasoning is Reasoning.CLOSED
        return cls(
            message.tool_format,
            as_json,
            message.choice,
            message.parallel_calls,
            message.reasoning,
            answer,
            tokenizer,
            None if is_closed else message.thinking_token_budget,
        )

    @property
    def num_characters(self) -> int:
        return len(self.tools) + (len(self.answer.text) if self.answer is not None else 0)

    def lower(self) -> Lowered:
        """Raises `GrammarError`."""
        tools = [
            FunctionTool(name, parameters, strict, TextGrammar(*text) if text else None)
            for name, parameters, strict, text in json.loads(self.tools)
        ]
        added_tokens = self.tokenizer.added_tokens
        if tools:
            lowered = tool_grammar(
                self.tool_format,
                tools,
                self.choice,
                parallel=self.parallel_calls,
                reasoning=self.reasoning,
                added_tokens=added_tokens,
                answer=self.answer,
                max_reasoning_tokens=self.max_reasoning_tokens,
            )
            assert lowered is not None, "nothing is constrained"
        else:
            assert self.answer is not None
            grammar = answer_grammar(
                self.tool_format,
                self.answer,
                reasoning=self.reasoning,
                added_tokens=added_tokens,
                max_reasoning_tokens=self.max_reasoning_tokens,
            )
            lowered = Lowered(grammar)
        check(lowered.grammar.text)
        return lowered


def _fields(grammar: TextGrammar | None) -> tuple[str, str] | None:
    return None if grammar is None else (grammar.syntax, grammar.definition)


class Constrainer:
    def __init__(self, grammars: Grammars, pool: EnginePool) -> None:
        self._grammars = grammars
        self._pool = pool

    async def grammar(self, constraint: OutputConstraint, model: ServedModel) -> tuple[Grammar | None, Sequence[str]]:
        """The grammar of the outputs, and warnings about what it does not enforce.

        Raises `UnsupportedField` if the model's engines support no grammars, `InvalidRequest` for a constraint that
        cannot be enforced.
        """
        content, message, param = constraint.content, constraint.message, constraint.param
        if self._pool.refuses_grammars(model.base_name):
            text = f"{param} is not supported by the engines of the model {model.base_name!r}."
            raise UnsupportedField(text, param=param)
        if message is not None and message.thinking_token_budget is not None:
            bounded = _bounded_reasoning(message, model, message.thinking_token_budget)
            if content is None and not message.constrains_calls:
                return bounded, ()
        grammar: Grammar | None = None
        warnings: list[str] = []
        try:
            if content is not None:
                lowered = await self._grammars.lower(content.params, model.tokenizer, strict=content.strict)
                grammar = lowered.grammar
                warnings += [f"{param}: {warning}" for warning in lowered.warnings]
            if message is not None:
                lowered = await self._grammars.get(MessageGrammarKey.of(message, grammar, model.tokenizer))
                grammar = lowered.grammar
                warnings += [f"tools: {warning}" for warning in lowered.warnings]
        except GrammarError as error:
            raise InvalidRequest(f"{param}: {error}.", param=param) from None
        return grammar, warnings


def _bounded_reasoning(message: MessageConstraint, model: ServedModel, max_tokens: int) -> Grammar | None:
    if message.reasoning is Reasoning.CLOSED and message.tool_format.reasoning is not None:
        return None
    grammar = reasoning_grammar(message.tool_format, max_tokens, message.reasoning, model.tokenizer.added_tokens)
    if grammar is None:
        raise UnsupportedField(NO_BUDGET, param=BUDGET)
    return grammar
