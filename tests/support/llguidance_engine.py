"""Grammars of an engine with a small tokenizer."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from proa.contract import EngineCoreRequest, Grammar, SamplingParams
from proa_engine.core.grammar import GrammarCursor, GrammarReady, MaskedSample
from proa_engine.grammar import SERVING_LIMITS, LLGuidanceGrammars, make_tokenizer
from support.tokenizers import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
VOCAB_SIZE = 420  # logits; the tokenizer has less tokens
EOS = 0
SECONDS = 60  # after which a grammar that is not compiled fails a test


def make_request(
    grammar: Grammar | str, *, request_id: str = "r", resumed: str | list[int] = "", **params: Any
) -> EngineCoreRequest:
    """`resumed` is a text or token ids."""
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[1],
        sampling_params=SamplingParams(
            grammar=Grammar(text=grammar) if isinstance(grammar, str) else grammar, **params
        ),
        resumed_token_ids=TOKENIZER.encode(resumed).ids if isinstance(resumed, str) else resumed,
    )


@contextmanager
def llguidance_grammars(*, max_samples: int = 8) -> Iterator[LLGuidanceGrammars]:
    tokenizer = make_tokenizer(TOKENIZER.to_str().encode(), vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
    assert tokenizer is not None
    grammars = LLGuidanceGrammars(
        tokenizer,
        [EOS],
        max_samples=max_samples,
        make_buffer=lambda num_bytes: memoryview(bytearray(num_bytes)),
        num_threads=2,
        limits=SERVING_LIMITS,
    )
    try:
        yield grammars
    finally:
        grammars.close()


def prepare(grammars: LLGuidanceGrammars, request: EngineCoreRequest) -> GrammarReady:
    """Wait for the request's grammar."""
    answers: SimpleQueue[GrammarReady] = SimpleQueue()
    cursor = grammars.prepare(request, answers.put, lambda: True)
    return answers.get(timeout=SECONDS) if cursor is None else GrammarReady(request.request_id, cursor)


def samples(cursors: Mapping[int, GrammarCursor]) -> list[MaskedSample]:
    """One sample of each row."""
    return [MaskedSample(row, 0, each) for row, each in cursors.items()]


def cursor(grammars: LLGuidanceGrammars, grammar: Grammar | str, text: str = "", **params: Any) -> GrammarCursor:
    """The cursor behind a text."""
    ready = prepare(grammars, make_request(grammar, **params))
    assert ready.cursor is not None, ready.error
    for token_id in TOKENIZER.encode(text).ids:
        assert ready.cursor.accept(token_id)
    return ready.cursor
