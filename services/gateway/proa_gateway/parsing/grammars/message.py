"""The grammar of a message: its tool calls, its answer or both, in the syntax of a model's format.

    tool_grammar(HERMES, tools, "required", parallel=True, reasoning=Reasoning.OPTIONAL, added_tokens=added_tokens)
    answer_grammar(HERMES, Grammar(text="start: ..."), reasoning=Reasoning.CLOSED, added_tokens=added_tokens)

Both may take seconds for large schemas and release the interpreter lock: call them in a thread.
"""

import json
import re
from collections.abc import Sequence
from enum import Enum, auto

from proa.contract.grammar import Grammar
from proa.grammar import GrammarError, Lowered
from proa.grammar.lark import AddedTokens, quote, split
from proa_gateway.parsing.format import (
    PLACE,
    CallObject,
    Channels,
    FunctionTool,
    NamedIds,
    NamedTool,
    ToolChoice,
    ToolFormat,
)
from proa_gateway.parsing.grammars.arguments import arguments_rules
from proa_gateway.parsing.grammars.rules import ANY, LarkRules

_NUMBER = "/[0-9]{1,3}/"
_SOME = "/(?s:.+)/"  # text, not empty
_GAP = r"/\n{1,2}/"  # after reasoning; the parser drops whitespace there


class CallsGrammar:
    """`rules`: all that the expressions need. `warnings`: which tools' schemas are not held. `opening_token`: what each
    call, or the list of them, begins with, if it is one token that stands nowhere else."""

    def __init__(
        self,
        tool_format: ToolFormat,
        tools: Sequence[FunctionTool],
        added_tokens: AddedTokens,
        *,
        parallel: bool,
        is_demanded: bool,
    ) -> None:
        """`parallel`: several calls are allowed. `is_demanded`: the output must be a call. Raises `GrammarError` as
        `arguments_rules` does."""
        self.rules = LarkRules(added_tokens)
        self.warnings: list[str] = []
        self._format = tool_format
        self._parallel = parallel and (tool_format.channels is None or tool_format.between != "")
        self._arguments: list[tuple[FunctionTool, str]] = []  # each tool with the expression of its arguments
        for index, tool in enumerate(tools):
            made = arguments_rules(tool_format.arguments, tool, added_tokens, f"tool_{index}_", is_demanded=is_demanded)
            self.rules.lines += made.lines
            self.warnings += made.warnings
            self._arguments.append((tool, made.expression))
        self._opening, token_id, self._shares_token = self._find_opening()
        self.opening_token = None if tool_format.at_start else token_id

    def calls(self) -> str:
        return self._calls("")

    def after_opening(self) -> str:
        """The calls that one `opening_token` begins, without it."""
        return self._calls(self._opening) if self._format.section else self._call(self._opening)

    def calls_or_text(self) -> str:
        """Text in which each opening of a call begins one that matches its schema."""
        if self._format.at_start:
            # Without ANY, bytes that are not UTF-8 may follow, so the terminal never ends for llguidance's lexer.
            text = self.rules.terminal(rf"{ANY} & ~(/\s*/ {quote(self._opening[0])} {ANY})")
            return f"{text} | {self.calls()}"
        if self._shares_token:
            dropped = map(self.rules.literal, self._format.dropped)
            text = self.rules.rule(f"({' | '.join([self.rules.terminal(_SOME), *dropped])})*")
            to_opening = f"{text} {self.rules.literal(self._opening)} {self.after_opening()}"
        else:
            text = self.rules.free_text()
            to_opening = f"{self.rules.text_until(self._opening)} {self.after_opening()}"
        return f"({to_opening})* {text}" if self._parallel else f"{text} | {to_opening}"

    def _find_opening(self) -> tuple[str, int | None, bool]:
        """What a call begins with: a token and its id, or a line. And whether the line begins with a token that other
        texts have too."""
        opening = (self._format.section or PLACE.split(self._format.call))[0].lstrip()
        piece, token_id = split(opening, self.rules.added_tokens)[0]
        is_shared = token_id is not None and any(
            piece in text for text in (*self._format.dropped, *(self._format.reasoning or ()))
        )
        if token_id is not None and not is_shared:
            return piece, token_id, False
        return opening.partition("\n")[0].rstrip() or piece, None, is_shared

    def _calls(self, skipped: str) -> str:
        opening, closing = self._format.section or ("", "")
        call = self._call("" if self._format.section else skipped)
        between = self._format.between
        repeats = skipped != "" and skipped in between  # a call follows another as it follows text
        # `between` is part of the next call's first terminal. As one of its own, with which the closing begins too, it
        # could not be followed by a call: llguidance reads on in the longer terminal, and gives no character back.
        more = f"{self._call('', between)}*" if self._parallel and not repeats else ""
        return f"{self._literal(opening.removeprefix(skipped))} {call} {more} {self._literal(closing)}"

    def _call(self, skipped: str, before: str = "") -> str:
        calls = [self._call_of(tool, arguments, skipped, before) for tool, arguments in self._arguments]
        return self.rules.rule(" | ".join(calls))

    def _call_of(self, tool: FunctionTool, arguments: str, skipped: str, before: str) -> str:
        name = tool.name
        if isinstance(self._format.arguments, CallObject):
            name = json.dumps(name, ensure_ascii=False)[1:-1]
        call = before + self._format.call.removeprefix(skipped).replace(self._format.optional, "")
        if isinstance(ids := self._format.call_ids, NamedIds):
            call = call.replace("$id", ids.template)
            an_id = ""
        else:
            an_id = f"/[{re.escape(ids.alphabet)}]{{{ids.length}}}/"
        places = {"$arguments": arguments, "$id": an_id, "$index": _NUMBER}
        parts = re.split(r"(\$(?:arguments|id|index))", call.replace("$name", name))
        return " ".join(filter(None, (places[part] if part in places else self._literal(part) for part in parts)))

    def _literal(self, text: str) -> str:
        return self.rules.literal(text) if text else ""


class Reasoning(Enum):
    """What the prompt leaves of the model's reasoning."""

    CLOSED = auto()  # the answer begins; also for models without reasoning
    OPEN = auto()  # the prompt has opened it
    OPTIONAL = auto()  # the model may open it


def tool_grammar(
    tool_format: ToolFormat,
    tools: Sequence[FunctionTool],
    choice: ToolChoice,
    *,
    parallel: bool,
    reasoning: Reasoning,
    added_tokens: AddedTokens,
    answer: Grammar | None = None,
    max_reasoning_tokens: int | None = None,
) -> Lowered | None:
    """The grammar that the choice demands. None: nothing is constrained, as with "auto" without a strict tool.

    `parallel`: several calls are allowed; with "auto", the parser must end the message after the first if not. With
    "auto", calls that begin with one of the format's `also_opens` are not constrained.
    `answer`: of the content if the model calls no tool. `added_tokens`: those of the model's tokenizer.
    `max_reasoning_tokens` needs a format for which `reasoning_grammar` is not None. Raises `GrammarError` for a strict
    tool whose schema cannot be held, and for one that is no JSON schema if the choice demands a call; of other tools,
    parts or all of the arguments are then free, and warnings say so.
    """
    if isinstance(choice, NamedTool):
        tools, parallel = [tool for tool in tools if tool.name == choice.name], False
    if not tools:
        raise GrammarError("there is no tool that the model may call")
    is_auto = choice == "auto"
    if is_auto and answer is None and not any(tool.strict for tool in tools):
        return None
    calls = CallsGrammar(tool_format, tools, added_tokens, parallel=parallel, is_demanded=not is_auto)
    grammar = _with_calls(tool_format, calls, answer, reasoning, max_reasoning_tokens, is_auto=is_auto)
    return Lowered(grammar, tuple(calls.warnings))


def _with_calls(
    tool_format: ToolFormat,
    calls: CallsGrammar,
    answer: Grammar | None,
    reasoning: Reasoning,
    max_reasoning_tokens: int | None,
    *,
    is_auto: bool,
) -> Grammar:
    if tool_format.channels:
        bodies = [calls.calls(), *([_answer_message(tool_format.channels, answer, calls.rules)] if is_auto else [])]
        return _in_channels(tool_format.channels, bodies, calls.rules, has_preamble=answer is None)
    opening = calls.opening_token
    if is_auto and answer is None and opening is not None and max_reasoning_tokens is None:
        return _grammar(calls.rules, calls.after_opening(), start_after=(opening,), repeats=True)
    if not is_auto:
        body = calls.calls()
    elif answer is None:
        body = calls.calls_or_text()
    else:
        body = f"{calls.calls()} | {_nested(answer, calls.rules)}"
    return _after_reasoning(tool_format, body, reasoning, calls.rules, max_reasoning_tokens)


def answer_grammar(
    tool_format: ToolFormat,
    answer: Grammar,
    *,
    reasoning: Reasoning,
    added_tokens: AddedTokens,
    max_reasoning_tokens: int | None = None,
) -> Grammar:
    """The grammar of a message without calls, whose content matches `answer`. `max_reasoning_tokens`: see
    `tool_grammar`. Raises `GrammarError`."""
    rules = LarkRules(added_tokens)
    if tool_format.channels and not answer.start_after:
        body = _answer_message(tool_format.channels, answer, rules)
        return _in_channels(tool_format.channels, [body], rules, has_preamble=False)
    if reasoning is Reasoning.CLOSED or (answer.start_after and max_reasoning_tokens is None):
        return answer
    return _after_reasoning(tool_format, _nested(answer, rules), reasoning, rules, max_reasoning_tokens)


def reasoning_grammar(
    tool_format: ToolFormat, max_tokens: int, reasoning: Reasoning, added_tokens: AddedTokens
) -> Grammar | None:
    """Return the grammar of at most `max_tokens` tokens of reasoning and its closing; what follows is free. None if its
    opening or closing is no token of the tokenizer. `reasoning` is not CLOSED."""
    if tool_format.reasoning is None or tool_format.channels is not None:
        return None
    opening, closing = (added_tokens.get(text) for text in tool_format.reasoning)
    if opening is None or closing is None:
        return None
    rules = LarkRules(added_tokens)
    text = rules.grammar(_bounded_text(max_tokens, closing, rules))
    # If the prompt has opened it, the grammar holds from the first token, unless that opens it once more.
    first = (opening,) if reasoning is Reasoning.OPEN else ()
    return Grammar(text=text, start_after=(opening,), free_if_first=first, repeats=True)


def _nested(answer: Grammar, rules: LarkRules) -> str:
    if answer.start_after:
        raise GrammarError("structural tags that begin with a token exclude tools and a bound of the reasoning")
    return rules.rule(f"%lark {{\n{answer.text}\n}}")


def _in_channels(channels: Channels, bodies: Sequence[str], rules: LarkRules, *, has_preamble: bool) -> Grammar:
    """Messages with reasoning and preambles, and one of the bodies with its header. A preamble is content, so there is
    none where the content must match a grammar."""
    kinds = (channels.reasoning, channels.preamble) if has_preamble else (channels.reasoning,)
    headers = (rules.literal(channels.open + header) for header in kinds)
    text = f"({' | '.join(headers)}) {rules.literal(channels.body)} {rules.free_text()}"
    before = f"({text} {rules.literal(channels.close[0] + channels.next)})*"
    return _grammar(rules, f"{before} ({' | '.join(bodies)})")


def _answer_message(channels: Channels, answer: Grammar | None, rules: LarkRules) -> str:
    header = rules.literal(channels.open + channels.answer + channels.body)
    return f"{header} {_nested(answer, rules) if answer else rules.free_text()}"


def _bounded_text(max_tokens: int, closing: int, rules: LarkRules) -> str:
    """At most so many tokens of text, none of them special, and the token `closing`."""
    text = rules.rule(ANY, f"[max_tokens={max_tokens}]") if max_tokens else ""
    return f"{text} <[{closing}]>"


def _after_reasoning(
    tool_format: ToolFormat, body: str, reasoning: Reasoning, rules: LarkRules, max_tokens: int | None
) -> Grammar:
    if reasoning is Reasoning.CLOSED or tool_format.reasoning is None:
        return _grammar(rules, body)
    opening, closing = tool_format.reasoning
    body = f"{rules.terminal(_GAP)}? ({body})"
    opening_id, closing_id = rules.added_tokens.get(opening), rules.added_tokens.get(closing)
    if max_tokens is not None:
        assert opening_id is not None
        assert closing_id is not None
        thinking = _bounded_text(max_tokens, closing_id, rules)
        # A prompt that has opened the reasoning may be followed by the opening once more.
        before = f"<[{opening_id}]>? {thinking}" if reasoning is Reasoning.OPEN else f"(<[{opening_id}]> {thinking})?"
        return _grammar(rules, f"{before} {body}")
    if closing_id is not None and reasoning is Reasoning.OPEN:
        return _grammar(rules, body, start_after=(closing_id,))
    if closing_id is not None and opening_id is not None:
        return _grammar(rules, body, start_after=(closing_id,), free_if_first=(opening_id,))
    thinking = rules.text_until(closing)
    if reasoning is Reasoning.OPTIONAL:
        thinking = f"({rules.literal(opening)} {thinking})?"
    return _grammar(rules, f"{thinking} {body}")


def _grammar(
    rules: LarkRules,
    start: str,
    *,
    start_after: tuple[int, ...] = (),
    free_if_first: tuple[int, ...] = (),
    repeats: bool = False,
) -> Grammar:
    try:
        return Grammar(text=rules.grammar(start), start_after=start_after, free_if_first=free_if_first, repeats=repeats)
    except ValueError as error:  # too large
        raise GrammarError(str(error)) from None
