"""Grammars: what is checked once, at the same time, or not at all."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

import proa_gateway.serving.grammars
from proa.contract import Grammar, StructuredOutputsParams
from proa.grammar import GrammarError, Lowered
from proa_gateway.errors import Overloaded
from proa_gateway.http.bodies import LargeBodies
from proa_gateway.serving.grammars import (
    MAX_BODY_DELAY,
    MAX_CACHED,
    MAX_CACHED_CHARACTERS,
    MAX_LARGE_WAITING,
    MIN_LARGE,
    Grammars,
)
from proa_gateway.tokenizer import Tokenizer
from support.fake_engine import tokenizer_files


class Checks:
    """Stands in for lowering and checking. `gate` holds up those of large constraints."""

    def __init__(self) -> None:
        self.regexes: list[str] = []
        self.gate = Event()
        self.gate.set()

    def __call__(self, key: Any) -> Lowered | str:
        self.regexes.append(key.params.regex)
        if key.num_characters >= MIN_LARGE:
            self.gate.wait(10)
        if key.params.regex == "wrong":
            return "why"
        return Lowered(Grammar(text="start: " + key.params.regex))


LATE = MAX_BODY_DELAY + 0.01


class LateBodies(LargeBodies):
    """Bodies that have waited for `seconds`, the first call's first, until `are_read` is set."""

    def __init__(self, *seconds: float) -> None:
        super().__init__()
        self._seconds = iter(seconds)
        self.are_read = asyncio.Event()

    async def none_waits(self) -> None:
        await self.are_read.wait()

    def delay(self) -> float:
        return 0.0 if self.are_read.is_set() else next(self._seconds)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Checks:
    made = Checks()
    monkeypatch.setattr(proa_gateway.serving.grammars, "_lower_and_check", made)
    return made


@pytest.fixture
async def executor() -> AsyncIterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


@pytest.fixture
def grammars(executor: ThreadPoolExecutor) -> Grammars:
    return Grammars(executor, LargeBodies())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    with ThreadPoolExecutor(1) as executor:
        return Tokenizer(tokenizer_files(), executor)


def params(regex: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=regex)


async def test_a_constraint_is_lowered_with_the_tokenizers_added_tokens(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    tag = '{"format": {"type": "const_string", "value": "a<think>"}}'
    lowered = await grammars.lower(StructuredOutputsParams(structural_tag=tag), tokenizer, strict=False)
    assert f'"a" <[{tokenizer.added_tokens["<think>"]}]>' in lowered.grammar.text


async def test_a_grammar_that_cannot_be_compiled_is_refused(grammars: Grammars, tokenizer: Tokenizer) -> None:
    for _ in range(2):
        with pytest.raises(GrammarError, match="Unsatisfiable"):
            await grammars.lower(StructuredOutputsParams(json='{"enum": []}'), tokenizer, strict=False)


async def test_strict_and_not_strict_are_different_results(grammars: Grammars, tokenizer: Tokenizer) -> None:
    schema = StructuredOutputsParams(json='{"oneOf": [{"type": "integer"}, {"type": "number"}]}')
    assert (await grammars.lower(schema, tokenizer, strict=False)).warnings
    with pytest.raises(GrammarError, match="oneOf"):
        await grammars.lower(schema, tokenizer, strict=True)


async def test_results_are_cached_and_errors_too(grammars: Grammars, tokenizer: Tokenizer, checks: Checks) -> None:
    for _ in range(3):
        assert (await grammars.lower(params("a"), tokenizer, strict=False)).grammar.text == "start: a"
        with pytest.raises(GrammarError, match=r"^why$"):
            await grammars.lower(params("wrong"), tokenizer, strict=False)
    assert checks.regexes == ["a", "wrong"]


async def test_the_least_recently_used_result_is_dropped(
    grammars: Grammars, tokenizer: Tokenizer, checks: Checks
) -> None:
    for index in range(MAX_CACHED):
        await grammars.lower(params(f"{index}"), tokenizer, strict=False)
    for regex in ("0", "new", "0", "1"):
        await grammars.lower(params(regex), tokenizer, strict=False)
    assert checks.regexes[MAX_CACHED:] == ["new", "1"]


async def test_cached_characters_are_bounded(grammars: Grammars, tokenizer: Tokenizer, checks: Checks) -> None:
    size = 200_000  # and the same again for the grammar
    num_cached = MAX_CACHED_CHARACTERS // (2 * size)
    texts = [f"{number}".rjust(size, "0") for number in range(num_cached + 1)]
    for text in (*texts, texts[0], texts[-1]):
        await grammars.lower(params(text), tokenizer, strict=False)
    assert checks.regexes == [*texts, texts[0]]


async def test_a_constraint_that_is_too_long_is_refused_unseen(
    grammars: Grammars, tokenizer: Tokenizer, checks: Checks
) -> None:
    with pytest.raises(GrammarError, match="at most 262144 bytes"):
        await grammars.lower(params("a" * 300_000), tokenizer, strict=False)
    assert not checks.regexes


async def test_requests_with_the_same_constraint_wait_for_one_check(
    grammars: Grammars, tokenizer: Tokenizer, checks: Checks
) -> None:
    checks.gate.clear()
    large = params("a" * MIN_LARGE)
    waiting = [asyncio.create_task(grammars.lower(large, tokenizer, strict=False)) for _ in range(20)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    checks.gate.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert all(isinstance(result, Lowered) for result in results[1:])
    assert len(checks.regexes) == 1


async def test_large_constraints_leave_a_thread_for_small_ones_and_too_many_are_rejected(
    grammars: Grammars, tokenizer: Tokenizer, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proa_gateway.serving.grammars, "MAX_LARGE_WAIT", 60.0)
    checks.gate.clear()
    texts = [str(number).rjust(MIN_LARGE, "0") for number in range(2 * MAX_LARGE_WAITING)]
    waiting = [asyncio.create_task(grammars.lower(params(text), tokenizer, strict=False)) for text in texts]
    assert await grammars.lower(params("small"), tokenizer, strict=False)
    checks.gate.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    rejected = [result for result in results if isinstance(result, Overloaded)]
    assert len(rejected) == MAX_LARGE_WAITING - 1
    assert sum(isinstance(result, Lowered) for result in results) == MAX_LARGE_WAITING + 1
    assert await grammars.lower(params(texts[-1]), tokenizer, strict=False)


async def test_a_large_constraint_that_waits_for_too_long_is_rejected(
    grammars: Grammars, tokenizer: Tokenizer, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proa_gateway.serving.grammars, "MAX_LARGE_WAIT", 0.01)
    checks.gate.clear()
    first = asyncio.create_task(grammars.lower(params("a" * MIN_LARGE), tokenizer, strict=False))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await grammars.lower(params("b" * MIN_LARGE), tokenizer, strict=False)
    checks.gate.set()
    assert await first
    assert await grammars.lower(params("b" * MIN_LARGE), tokenizer, strict=False)


async def test_large_constraints_are_rejected_while_bodies_wait_too_long_to_be_read(
    executor: ThreadPoolExecutor, tokenizer: Tokenizer, checks: Checks
) -> None:
    grammars = Grammars(executor, LateBodies(MAX_BODY_DELAY, MAX_BODY_DELAY, LATE))
    large = params("a" * MIN_LARGE)
    assert await grammars.lower(large, tokenizer, strict=False)
    assert await grammars.lower(large, tokenizer, strict=False)  # its result is known
    assert await grammars.lower(params("small"), tokenizer, strict=False)
    with pytest.raises(Overloaded):
        await grammars.lower(params("b" * MIN_LARGE), tokenizer, strict=False)
    assert len(checks.regexes) == 2


async def test_a_large_constraint_that_waits_is_checked_after_late_bodies_are_read(
    executor: ThreadPoolExecutor, tokenizer: Tokenizer, checks: Checks
) -> None:
    bodies = LateBodies(0.0, LATE)
    grammars = Grammars(executor, bodies)
    large = asyncio.create_task(grammars.lower(params("a" * MIN_LARGE), tokenizer, strict=False))
    assert await grammars.lower(params("small"), tokenizer, strict=False)
    assert checks.regexes == ["small"]
    bodies.are_read.set()
    assert await large


async def test_a_large_constraint_is_rejected_if_bodies_are_read_for_too_long(
    executor: ThreadPoolExecutor, tokenizer: Tokenizer, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proa_gateway.serving.grammars, "MAX_LARGE_WAIT", 0.01)
    bodies = LateBodies(0.0, LATE)
    grammars = Grammars(executor, bodies)
    with pytest.raises(Overloaded):
        await grammars.lower(params("a" * MIN_LARGE), tokenizer, strict=False)
    assert not checks.regexes
    bodies.are_read.set()
    assert await grammars.lower(params("a" * MIN_LARGE), tokenizer, strict=False)
