"""A tokenizer may have an added token for any part of a format's tags: calls are read and constrained as without it."""
# ruff: noqa: RUF001 - DeepSeek's tokens have a fullwidth bar

import re
from collections.abc import Iterator
from random import Random

import pytest

from proa_gateway.parsing.compiled_format import State, compile_format
from proa_gateway.parsing.format import CallTexts, FunctionTool, ObjectLiteral, PythonCall, Tagged, ToolFormat
from proa_gateway.parsing.formats import LFM2
from proa_gateway.parsing.grammars.message import Reasoning, tool_grammar
from proa_gateway.parsing.json_formats import HERMES, HUNYUAN_A13B
from proa_gateway.parsing.tagged_formats import DEEPSEEK_V32, KIMI_K3, MINIMAX_M3
from support.format_writers import WRITERS, Call, Writer
from support.thorough import THOROUGH
from support.tool_grammars import accepts_message, fresh_format_tokenizer
from support.transcripts import Replay, Transcript, parse, without_ids

NUM_READ, NUM_CONSTRAINED = 12, 3  # tokens of a format, unless tests are thorough
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
CLOCK = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [FunctionTool("weather", WEATHER, strict=True), FunctionTool("clock", CLOCK, strict=True)]
CALLS: list[Call] = [("weather", {"city": "Rome", "days": 3}), ("clock", {})]
_UNITS = re.compile(r"\w+|\W")
CASES = [(writer, has_tokens) for writer in WRITERS for has_tokens in (True, False) if has_tokens or writer.may_be_text]


def each(cases: list[tuple[Writer, bool]]) -> pytest.MarkDecorator:
    ids = [f"{writer.tool_format.name}-{'tokens' if has_tokens else 'text'}" for writer, has_tokens in cases]
    return pytest.mark.parametrize(("writer", "has_tokens"), cases, ids=ids)


def tags(tool_format: ToolFormat) -> Iterator[str]:
    """The lines of the format's texts, cut at places."""
    call = CallTexts.of(tool_format)
    texts = [call.opening, call.closing, *tool_format.also_opens, *tool_format.dropped]
    texts += [*(tool_format.section or ()), *(tool_format.reasoning or ())]
    match tool_format.arguments:
        case Tagged(template, quotes):
            texts += [*re.split(r"\$\w+", template), *(quotes or ())]
        case ObjectLiteral(quote):
            texts.append(quote)
    for text in texts:
        yield from filter(str.strip, text.split("\n"))


def parts(writer: Writer, has_tokens: bool) -> list[str]:
    """Texts within the format's tags that a tokenizer may have as a token beside the format's own."""
    found: set[str] = set()
    own = writer.tokens if has_tokens else ()
    cut = f"({'|'.join(map(re.escape, sorted(own, key=len, reverse=True)))})" if own else r"(?!)"
    for tag in tags(writer.tool_format):
        for run in filter(None, re.split(cut, tag)):
            units = _UNITS.findall(run)
            ends = range(1, len(units) + 1)
            found.update("".join(units[begin:end]) for begin in range(len(units)) for end in ends if begin < end)
    return sorted(part for part in found if part.strip() and part not in own)


def sampled(candidates: list[str], num_samples: int, seed: str) -> list[str]:
    """Some of the candidates, and each whole tag among them."""
    whole = [part for part in candidates if re.fullmatch(r"<[^<>]+>", part)]
    num = len(candidates) if THOROUGH else min(len(candidates), num_samples)
    return list(dict.fromkeys([*whole, *Random(seed).sample(candidates, num)]))


@each(CASES)
def test_calls_are_read_whatever_part_of_a_tag_is_a_token(writer: Writer, has_tokens: bool) -> None:
    opening, closing = writer.reasoning or ("", "")
    text = (f"{opening}Hm?{closing}" if opening else "") + writer.calls(CALLS)
    transcript = Transcript(text, tools={tool.name: tool.parameters for tool in TOOLS})
    own = writer.tokens if has_tokens else ()
    expected = without_ids(Replay(writer.tool_format, transcript, own).in_pieces(len(text)))
    assert [name for name, _ in expected[2]] == ["weather", "clock"]
    for token in sampled(parts(writer, has_tokens), NUM_READ, writer.tool_format.name):
        replay = Replay(writer.tool_format, transcript, (*own, token))
        for size in (1, len(text)):
            assert without_ids(replay.in_pieces(size)) == expected, f"{token!r}, {size} characters"


@each([case for case in CASES if case[0].tool_format.channels is None or case[0].tool_format.between])
def test_calls_are_constrained_whatever_part_of_a_tag_is_a_token(writer: Writer, has_tokens: bool) -> None:
    tool_format = writer.tool_format
    right, wrong = writer.calls(CALLS), writer.calls([("weather", {"city": "Rome", "days": "x"})])
    if isinstance(tool_format.arguments, PythonCall):
        right, wrong = right.replace("'", '"'), wrong.replace("'", '"')
    own = writer.tokens if has_tokens else ()
    candidates = [part for part in parts(writer, has_tokens) if any(map(str.isalnum, part))]  # not as in JSON
    for token in [None, *sampled(candidates, NUM_CONSTRAINED, tool_format.name)]:
        tokenizer = fresh_format_tokenizer(*own, *([token] if token else []))
        for choice in ("required", "auto"):
            made = tool_grammar(
                tool_format,
                TOOLS,
                choice,
                parallel=True,
                reasoning=Reasoning.CLOSED,
                added_tokens=tokenizer.added_tokens,
            )
            assert made is not None
            texts = [f"a < b ] [ x\n{right}\nBye"] if writer.allows_content and choice == "auto" else []
            for text in [right, *texts]:
                assert accepts_message(made.grammar, text, tokenizer), (choice, token, text)
            assert not accepts_message(made.grammar, wrong, tokenizer), (choice, token)


@pytest.mark.parametrize(
    ("tool_format", "tokens", "by_id"),
    [
        (HERMES, ["<tool_call>", "</tool_call>", "tool", "_call>"], {"<tool_call>", "</tool_call>"}),
        (DEEPSEEK_V32, ["｜DSML｜", "<think>"], {"<think>"}),
        (KIMI_K3, ["<|open|>", "<|close|>", "<|sep|>"], set()),
        (MINIMAX_M3, ["<tool_call>", "</tool_call>", "<mm:think>"], {"<mm:think>"}),
        (MINIMAX_M3, ["]<]minimax[>[", "<tool_call>", "</tool_call>"], set()),
        (HUNYUAN_A13B, ["<tool_calls>", "</tool_calls>", "<"], {"<tool_calls>"}),
        (LFM2, ["<|tool_call_start|>", "<|tool_call_end|>", "]"], {"<|tool_call_start|>"}),
    ],
)
def test_only_tokens_that_are_tags_are_found_by_their_ids(
    tool_format: ToolFormat, tokens: list[str], by_id: set[str]
) -> None:
    added = {token: token_id for token_id, token in enumerate(tokens)}
    compiled = compile_format(tool_format, added, calls=True)
    found = {token_id for state in State for token_id in compiled.terminals[state].by_id}
    assert {tokens[token_id] for token_id in found} == by_id


@pytest.mark.parametrize("between", ["", "\n"])
def test_the_token_that_ends_a_section_is_no_content(between: str) -> None:
    text = f'<tool_calls>[{{"name": "f", "arguments": {{}}}}]{between}</tool_calls>\nYes.'
    message = parse(HUNYUAN_A13B, text, ["<tool_calls>", "</tool_calls>"])
    assert ([call.name for call in message.calls], message.content) == (["f"], "Yes.")
