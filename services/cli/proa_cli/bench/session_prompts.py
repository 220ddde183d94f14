"""The prompts of one session after the other, drawn as a workload says or read from a trace."""

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import orjson

from proa_cli.bench.session_plans import Turn, Workload

Write = Callable[[int, np.random.Generator], str]
"""Makes a text of so many tokens."""
_BLOCK_TOKENS: Final = 512  # of a hash id, as in the traces of Mooncake


@dataclass(frozen=True, slots=True)
class Prompt:
    """`parts` are by turns the user's and the model's. `gap`: seconds between the turn's end, or that of its sub-agent,
    and the next turn. `tokens_before`: of its beginning, which the server has computed for other prompts; None: those
    of the turn before."""

    parts: Sequence[str]
    output_tokens: int
    gap: float
    tokens_before: int | None
    subagent: Iterator["Prompt"] | tuple[()] = ()


class Sessions(Protocol):
    """Makes sessions. Texts are made when the iterators are asked for them, which takes a while."""

    def begin(self, number: int, most_turns: int) -> tuple[int, Iterator[Prompt]]:
        """The number of turns of a session, from 1 to `most_turns`, and their prompts. `number`: from 1."""
        ...


@dataclass(frozen=True, slots=True)
class DrawnSessions:
    """Sessions as a workload says. The same for the same seed, whatever the order in which they begin."""

    workload: Workload
    write: Write
    seed: int
    shared: str

    def begin(self, number: int, most_turns: int) -> tuple[int, Iterator[Prompt]]:
        draw = np.random.default_rng([self.seed, 2, number])
        turns = self.workload.plan(draw, most_turns)
        return sum(1 + len(each.subagent) for each in turns), self._prompts(turns, draw)

    def _prompts(self, turns: Sequence[Turn], draw: np.random.Generator) -> Iterator[Prompt]:
        parts, answer_tokens, shared_tokens = list[str](), 0, self.workload.shared_tokens
        for index, turn in enumerate(turns):
            new = self._parts(turn.new_tokens, answer_tokens, draw)
            parts += new if index else [self.shared + new[0]]
            before, subagent = None if index else shared_tokens, self._prompts(turn.subagent, draw)
            yield Prompt(tuple(parts), turn.output_tokens, turn.gap, before, subagent)
            answer_tokens = turn.output_tokens

    def _parts(self, new_tokens: int, answer_tokens: int, draw: np.random.Generator) -> list[str]:
        """The model's part, in the place of what it has answered, and the user's; a first turn has no answer."""
        answered = min(answer_tokens, new_tokens - 1)
        lengths = [answered, new_tokens - answered] if answered else [new_tokens]
        return [self.write(length, draw) for length in lengths]


class TracedTurn(NamedTuple):
    """`hash_ids`: of the prompt's blocks. Equal ids are equal text."""

    hash_ids: Sequence[int]
    output_tokens: int
    gap: float


class TracedSessions:
    """The sessions of a trace, in their order, each once."""

    def __init__(self, sessions: Sequence[Sequence[TracedTurn]], write: Write, seed: int) -> None:
        self._sessions, self._write, self._seed = sessions, write, seed
        self._sent = set[int]()  # ids of blocks that prompts had

    def begin(self, number: int, most_turns: int) -> tuple[int, Iterator[Prompt]]:
        turns = self._sessions[number - 1][:most_turns]
        return len(turns), self._prompts(turns)

    def _prompts(self, turns: Sequence[TracedTurn]) -> Iterator[Prompt]:
        texts: Mapping[int, str] = {}
        for turn in turns:
            texts = {each: texts.get(each) or self._text(each) for each in turn.hash_ids}
            num_sent = sum(1 for _ in itertools.takewhile(self._sent.__contains__, turn.hash_ids))
            self._sent.update(turn.hash_ids)
            text = "".join(texts[each] for each in turn.hash_ids)
            yield Prompt((text,), turn.output_tokens, turn.gap, num_sent * _BLOCK_TOKENS)

    def _text(self, hash_id: int) -> str:
        return self._write(_BLOCK_TOKENS, np.random.default_rng([self._seed, 3, hash_id]))


def read_trace(path: Path) -> list[list[TracedTurn]]:
    """The sessions of a file of JSON lines, in the order of their first lines. Raises `OSError`, and `ValueError` for a
    line that is no turn."""
    sessions: dict[str | int, list[tuple[int, TracedTurn]]] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            session, turn, traced = _read_turn(orjson.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number} is not a turn of a session: {error!r}") from None
        sessions.setdefault(session, []).append((turn, traced))
    if not sessions:
        raise ValueError(f"{path} has no turns")
    return [[turn for _, turn in sorted(each, key=operator.itemgetter(0))] for each in sessions.values()]


def _read_turn(fields: Any) -> tuple[str | int, int, TracedTurn]:
    """The session, the turn's number, and the turn. Raises `KeyError`, `TypeError` and `ValueError`."""
    ids, output_tokens, gap = [int(each) for each in fields["hash_ids"]], int(fields["output_tokens"]), fields["gap"]
    if not ids or min(ids) < 0 or output_tokens < 1 or not 0 <= gap < math.inf:
        raise ValueError("hash_ids must be numbers of at least 0, output_tokens at least 1, gap at least 0")
    return fields["session"], int(fields["turn"]), TracedTurn(ids, output_tokens, float(gap))
