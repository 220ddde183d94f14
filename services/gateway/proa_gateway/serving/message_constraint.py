"""MessageConstraint: what the form of a message demands of the output: calls, which ones, and reasoning before them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from proa.contract import Grammar
from proa.grammar import GrammarError, Lowered, check
from proa_gateway.parsing.format import ToolFormat
from proa_gateway.parsing.grammar import Reasoning, answer_grammar, tool_grammar
from proa_gateway.parsing.tool import FunctionTool, ToolChoice
from proa_gateway.serving.tools import Tool
from proa_gateway.tokenizer import Tokenizer

BUDGET = "thinking_token_budget"
NO_BUDGET = f"{BUDGET} needs a model whose reasoning begins and ends with tokens of its own, and is separated."


@dataclass(frozen=True, slots=True)
class MessageConstraint:
    """`tools`: those that the model may call. `thinking_token_budget`: of its reasoning; None: no bound."""

    tool_format: ToolFormat
    tools: Sequence[Tool]
    choice: ToolChoice
    parallel_calls: bool
    reasoning: Reasoning
    thinking_token_budget: int | None = None

    @property
    def constrains(self) -> bool:
        """Whether it constrains an answer that nothing else constrains."""
        return self.thinking_token_budget is not None or self.constrains_calls

    @property
    def constrains_calls(self) -> bool:
        return bool(self.tools) and (self.choice != "auto" or any(tool.function.strict for tool in self.tools))

    @property
    def param(self) -> str:
        """The request's field, for errors."""
        if self.thinking_token_budget is not None and not self.constrains_calls:
            return BUDGET
        return "tools" if self.choice == "auto" else "tool_choice"


@dataclass(frozen=True, slots=True)
class MessageGrammarKey:
    """The grammar of a message, as a key of `Grammars`. `answer`: of the content."""

    tool_format: ToolFormat
    tools: str  # names, schemas and whether they are strict, as JSON
    choice: ToolChoice
    parallel_calls: bool
    reasoning: Reasoning
    answer: Grammar | None
    tokenizer: Tokenizer

    @classmethod
    def of(cls, message: MessageConstraint, answer: Grammar | None, tokenizer: Tokenizer) -> "MessageGrammarKey":
        """Raises `GrammarError` for schemas that are nested too deeply."""
        functions = [tool.function for tool in message.tools]
        try:
            tools = json.dumps([[each.name, each.parameters or {}, bool(each.strict)] for each in functions])
        except RecursionError:
            raise GrammarError("the parameters are nested too deeply") from None
        parallel = message.parallel_calls
        return cls(message.tool_format, tools, message.choice, parallel, message.reasoning, answer, tokenizer)

    @property
    def num_characters(self) -> int:
        return len(self.tools) + (len(self.answer.text) if self.answer is not None else 0)

    def lower(self) -> Lowered:
        """Raises `GrammarError`."""
        tools = [FunctionTool(name, parameters, strict) for name, parameters, strict in json.loads(self.tools)]
        added_tokens = self.tokenizer.added_tokens
        if tools:
            grammar = tool_grammar(
                self.tool_format,
                tools,
                self.choice,
                parallel=self.parallel_calls,
                reasoning=self.reasoning,
                added_tokens=added_tokens,
                answer=self.answer,
            )
            assert grammar is not None, "nothing is constrained"
        else:
            assert self.answer is not None
            grammar = answer_grammar(self.tool_format, self.answer, reasoning=self.reasoning, added_tokens=added_tokens)
        check(grammar.text)
        return Lowered(grammar)
