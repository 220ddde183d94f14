"""GrammarBuilder: why a grammar is refused before its request begins, and what building one leaves behind."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
from llguidance import LLParserLimits

from proa.contract import StructuredOutputsParams
from proa.grammar import GrammarError, lower
from proa_engine.core.grammar import GrammarCursor
from proa_engine.grammar import LLGuidanceGrammars
from proa_engine.grammar.builder import GrammarBuilder, TooComplex, Unsatisfiable
from proa_engine.grammar.tokenizer import make_tokenizer
from support.llguidance_engine import (
    EOS,
    TOKENIZER,
    VOCAB_SIZE,
    cursor,
    llguidance_grammars,
    make_request,
    prepare,
    samples,
)

EXPLOSIVE = "start: /(.*a){1,30}.{30,2000}c{3}/"  # tokens need ever new states of the lexer
OBJECT = {"type": "object"}


@pytest.fixture(scope="module")
def builder() -> GrammarBuilder:
    tokenizer = make_tokenizer(TOKENIZER.to_str().encode(), vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
    assert tokenizer is not None
    return GrammarBuilder(tokenizer)


@pytest.fixture
def grammars() -> Iterator[LLGuidanceGrammars]:
    with llguidance_grammars() as made:
        yield made


REFUSED: dict[str, tuple[dict[str, object], type[GrammarError], str]] = {
    "matches nothing": ({"regex": r"[^\s\S]"}, Unsatisfiable, "no text can follow"),
    "a pattern that is a property's name": (
        {"json": {"type": "object", "properties": {"x-1": OBJECT}, "patternProperties": {"^x-1$": OBJECT}}},
        Unsatisfiable,  # by llguidance: it forces the name and then has nothing to continue with
        "no text can follow",
    ),
    "many repetitions": ({"regex": "(a{1000}){1000}b1c1"}, TooComplex, "a regular expression takes too long to follow"),
    "many optional properties": (
        {"json": {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(600)}}},
        TooComplex,
        "too many alternatives at one place",
    ),
}


@pytest.mark.parametrize(("fields", "kind", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_says_what_fails(
    builder: GrammarBuilder, fields: dict[str, object], kind: type[GrammarError], reason: str
) -> None:
    text = lower(StructuredOutputsParams(**fields), {}).grammar.text  # type: ignore[arg-type]
    with pytest.raises(kind, match=reason):
        builder.build(text)


TEXTS: dict[str, dict[str, object]] = {
    "const": {"json": {"const": "a<think>b"}},
    "enum": {"json": {"enum": ["<eos>", "<think>"]}},
    "property": {"json": {"type": "object", "properties": {"<eos>": {"const": 1}}, "required": ["<eos>"]}},
    "choice": {"choice": ["<think>", "a<eos>"]},
    "regex": {"regex": "a<eos>b+"},
    "Lark": {"grammar": 'start: "<eos>" "<think>"'},
    "plain": {"regex": "(added Ω token)?<think>"},
}


@pytest.mark.parametrize("fields", TEXTS.values(), ids=TEXTS)
def test_the_text_of_an_added_token_is_written_with_ordinary_tokens(
    grammars: LLGuidanceGrammars, fields: dict[str, object]
) -> None:
    special = {TOKENIZER.token_to_id(text) for text in ("<eos>", "<think>")}
    text = lower(StructuredOutputsParams(**fields), {}).grammar.text  # type: ignore[arg-type]
    for seed in range(8):
        state, rng = cursor(grammars, text), random.Random(seed)
        token_ids: list[int] = []
        while not state.is_complete and len(token_ids) < 200:
            bits = allowed(grammars, state)
            token_ids.append(rng.choice(bits))
            assert state.accept(token_ids[-1])
        assert not special & {*token_ids[:-1]}
        assert "<eos>" in TOKENIZER.decode(token_ids, skip_special_tokens=False) or "<think>" in TOKENIZER.decode(
            token_ids
        )


def test_an_added_token_is_named_by_its_text_in_lark_and_stands_in_no_free_text(grammars: LLGuidanceGrammars) -> None:
    think = TOKENIZER.encode("<think>").ids[0]
    text = lower(StructuredOutputsParams(grammar='start: "a" <think> /(?s:.*)/'), {"<think>": think}).grammar.text

    state = cursor(grammars, text, "a")

    assert allowed(grammars, state) == [think]
    assert state.accept(think)
    assert think not in allowed(grammars, state)
    assert TOKENIZER.token_to_id("added Ω token") in allowed(grammars, state)


def test_a_request_whose_allowed_tokens_begin_no_output_is_refused_before_it_begins(
    grammars: LLGuidanceGrammars,
) -> None:
    (a,), (b,) = TOKENIZER.encode("a").ids, TOKENIZER.encode("b").ids
    for _ in range(2):  # the grammar is compiled, then cached
        ready = prepare(grammars, make_request('start: "a"', allowed_token_ids=[b]))
        assert "none of allowed_token_ids" in ready.error
        assert not ready.retryable
        assert prepare(grammars, make_request('start: "a"', allowed_token_ids=[b, a])).cursor is not None


def allowed(grammars: LLGuidanceGrammars, state: GrammarCursor) -> list[int]:
    masks = grammars.fill(samples({0: state}))
    assert masks is not None
    found: list[int] = np.unpackbits(np.frombuffer(masks.bits, np.uint8), bitorder="little").nonzero()[0].tolist()
    return found


def generate(grammars: LLGuidanceGrammars, state: GrammarCursor, seed: int, num_tokens: int = 3000) -> int:
    """Continue an output at random. Returns how many tokens were accepted, until one was not."""
    rng = random.Random(seed)
    for number in range(num_tokens):
        bits = allowed(grammars, state)
        if not bits or not state.accept(rng.choice(bits)) or state.is_complete:
            return number
    return num_tokens


def test_a_grammar_that_fails_while_generating_says_why_and_fails_no_later_request(
    grammars: LLGuidanceGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = LLParserLimits(max_lexer_states=6000, verbose_errors=False)
    monkeypatch.setattr("proa_engine.grammar.builder._LIMITS", limits)
    monkeypatch.setattr("proa_engine.grammar.builder.WALKED_SECONDS", 0.0)
    for _ in range(2):
        state = cursor(grammars, EXPLOSIVE)
        assert generate(grammars, state, seed=1) > 24, "each request has a lexer without the states of trial walks"
        assert "need too many states" in state.matcher.error
