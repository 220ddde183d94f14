"""Requests with Lark grammars of users and with those of tool calls, and an engine's grammars for them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer

from proa.contract import EngineCoreRequest, Grammar, SamplingParams, StructuredOutputsParams
from proa.grammar import lower
from proa_engine.grammar import NO_LIMITS, LLGuidanceGrammars, make_tokenizer
from proa_gateway.parsing.format import FunctionTool, NamedTool, ToolChoice
from proa_gateway.parsing.grammars.message import Reasoning, tool_grammar
from proa_gateway.parsing.json_formats import HERMES
from support.engine import request

_LARK = [
    r"""start: "The capital of " NAME " is " NAME ". It has about " number " inhabitants."
NAME: /[A-Z][a-z]{2,8}/
number: /[1-9]/ /[0-9]{0,2}/ (",000")*""",
    r"""start: sum "."
sum: term (" + " term){1,4}
term: /[0-9]{1,3}/ | "(" sum ")" """,
]
_TOOLS = [
    FunctionTool(
        name="get_weather",
        parameters={
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
        strict=True,
    ),
    FunctionTool(
        name="add",
        parameters={
            "type": "object",
            "properties": {name: {"type": "integer", "minimum": 0, "maximum": 999} for name in ("a", "b")},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        strict=True,
    ),
]
_CHOICES: list[ToolChoice] = ["required", NamedTool("add"), "auto"]


def grammar_requests(folder: Path, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> list[EngineCoreRequest]:
    """Requests with these prompts to the model in `folder`, each with the next of the grammars."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    added = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    grammars: list[Grammar] = [lower(StructuredOutputsParams(grammar=text), added).grammar for text in _LARK]
    for choice in _CHOICES:
        lowered = tool_grammar(HERMES, _TOOLS, choice, parallel=True, reasoning=Reasoning.CLOSED, added_tokens=added)
        assert lowered
        grammars.append(lowered.grammar)
    return [
        request(
            f"{index}",
            list(prompt),
            SamplingParams(
                temperature=0.8 * (index // len(grammars) % 2),
                max_tokens=max_tokens,
                key=index,
                grammar=grammars[index % len(grammars)],
            ),
        )
        for index, prompt in enumerate(prompts)
    ]


@contextmanager
def grammars_for(folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> Iterator[LLGuidanceGrammars]:
    """Grammars of an engine with the model in `folder`, for steps of up to 512 samples."""
    data = (folder / "tokenizer.json").read_bytes()
    tokenizer = make_tokenizer(data, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    assert tokenizer is not None
    grammars = LLGuidanceGrammars(
        tokenizer,
        eos_token_ids,
        max_samples=512,
        make_buffer=lambda num_bytes: memoryview(bytearray(num_bytes)),
        num_threads=1,
        limits=NO_LIMITS,
    )
    try:
        yield grammars
    finally:
        grammars.close()
