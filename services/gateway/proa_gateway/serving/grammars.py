"""Grammars: lowers and checks constraints on threads of its own, and caches the results."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Hashable
from concurrent.futures import Executor
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from proa.contract import StructuredOutputsParams
from proa.contract.grammar import MAX_GRAMMAR_BYTES
from proa.grammar import GrammarError, Lowered, check, lower
from proa_gateway.errors import Overloaded
from proa_gateway.http.bodies import LargeBodies
from proa_gateway.tokenizer import Tokenizer

MIN_LARGE = 8192
"""Characters of a constraint that is large. One large constraint is checked at a time, so that a thread is left for
the others: checking takes 1 ms for most, and up to seconds for large ones."""
MAX_LARGE_WAITING = 32
MAX_LARGE_WAIT = 0.8  # seconds; what has waited for longer is rejected, so that clients know within 2 s
MAX_BODY_DELAY = 0.25
"""Seconds. When large bodies have waited for longer to be read, large constraints are rejected at once, and no check of
those that wait is started until all bodies are read: most of their requests can be answered without delay."""
MAX_CACHED = 1024  # results
MAX_CACHED_CHARACTERS = 8 * 2**20  # of constraints and their grammars
_TOO_MANY_LARGE = "Too many large constraints wait to be checked."


class GrammarKey(Hashable, Protocol):
    """The key of a cached grammar: all that the grammar depends on."""

    @property
    def num_characters(self) -> int:
        """Number of characters of the texts that the grammar is made from."""
        ...

    def lower(self) -> Lowered:
        """The grammar, checked. Runs on another thread. Raises `GrammarError`."""
        ...


@dataclass(frozen=True, slots=True)
class _ParamsKey:
    params: StructuredOutputsParams  # hashable: JSON as text
    strict: bool  # refuse a JSON schema that can be enforced only in part
    tokenizer: Tokenizer  # its added tokens are terminals of the grammar

    @property
    def num_characters(self) -> int:
        params = self.params
        texts = (params.json, params.regex, params.grammar, params.structural_tag, params.whitespace_pattern)
        return sum(len(text) for text in (*texts, *(params.choice or ())) if isinstance(text, str))

    def lower(self) -> Lowered:
        lowered = lower(self.params, self.tokenizer.added_tokens, strict=self.strict)
        check(lowered.grammar.text)
        return lowered


_Result = Lowered | str  # the grammar, or why there is none


class Grammars:
    """`executor` needs two threads, with stacks of 8 MiB. `bodies`: those that wait to be read."""

    def __init__(self, executor: Executor, bodies: LargeBodies) -> None:
        self._executor = executor
        self._bodies = bodies
        self._cached: OrderedDict[GrammarKey, _Result] = OrderedDict()  # least recently used first
        self._num_characters = 0  # of `_cached`, keys and results
        self._pending: dict[GrammarKey, asyncio.Task[_Result]] = {}  # running and waiting
        self._large = asyncio.Lock()  # held while a large constraint is checked
        self._num_large = 0  # of `_pending`

    async def lower(self, params: StructuredOutputsParams, tokenizer: Tokenizer, *, strict: bool) -> Lowered:
        """The grammar that is sent to engines. Raises `GrammarError` for a constraint that cannot be held.

        In `params`, JSON must be text and choices a tuple. Raises `Overloaded` if too many large constraints wait.
        """
        return await self.get(_ParamsKey(params, strict, tokenizer))

    async def get(self, key: GrammarKey) -> Lowered:
        """The grammar of `key`. Raises as `lower`."""
        if (size := key.num_characters) > MAX_GRAMMAR_BYTES:
            raise GrammarError(f"a constraint must be at most {MAX_GRAMMAR_BYTES} bytes long, this one has {size}")
        result = self._cached.get(key)
        if result is None:
            # Shielded: other requests may wait for the same task.
            result = await asyncio.shield(self._pending.get(key) or self._start(key))
        else:
            self._cached.move_to_end(key)
        if isinstance(result, str):
            raise GrammarError(result)
        return result

    def _start(self, key: GrammarKey) -> asyncio.Task[_Result]:
        is_large = key.num_characters >= MIN_LARGE
        if is_large and (self._num_large > MAX_LARGE_WAITING or self._bodies.delay() > MAX_BODY_DELAY):
            raise Overloaded(_TOO_MANY_LARGE)
        self._num_large += is_large
        task = self._pending[key] = asyncio.create_task(self._run(key, is_large=is_large))
        task.add_done_callback(lambda _: self._ended(key, is_large=is_large))
        return task

    def _ended(self, key: GrammarKey, *, is_large: bool) -> None:
        del self._pending[key]
        self._num_large -= is_large

    async def _run(self, key: GrammarKey, *, is_large: bool) -> _Result:
        async with self._turn() if is_large else nullcontext():
            result = await asyncio.get_running_loop().run_in_executor(self._executor, _lower_and_check, key)
        self._cache(key, result)
        return result

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Raises `Overloaded`."""
        try:
            async with asyncio.timeout(MAX_LARGE_WAIT) as limit, self._large:
                if self._bodies.delay() > MAX_BODY_DELAY:
                    await self._bodies.none_waits()
                limit.reschedule(None)
                yield
        except TimeoutError:
            raise Overloaded(_TOO_MANY_LARGE) from None

    def _cache(self, key: GrammarKey, result: _Result) -> None:
        self._cached[key] = result
        self._num_characters += _size(key, result)
        while len(self._cached) > MAX_CACHED or self._num_characters > MAX_CACHED_CHARACTERS:
            self._num_characters -= _size(*self._cached.popitem(last=False))


def _lower_and_check(key: GrammarKey) -> _Result:
    try:
        return key.lower()
    except GrammarError as error:
        return str(error)


def _size(key: GrammarKey, result: _Result) -> int:
    return key.num_characters + len(result if isinstance(result, str) else result.grammar.text)
