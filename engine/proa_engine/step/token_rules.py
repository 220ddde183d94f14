"""RuleColumns: logit bias, allowed tokens, bad words, the minimum length and timestamps, as flat positions in a step's
logits.

The host turns the rules of the samples that have some into index arrays; the sampler applies them to all at once.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from proa.contract import SamplingParams, TimestampRules
from proa_engine.core.types import NewRequestData
from proa_engine.step.slots import SlotTables
from proa_engine.step.staging import IntArray, Packer

_LARGEST_ID = 2**31 - 1
_ANY = -1  # matches any token: padding before a bad word that is shorter than the longest

# Sampling parameters that use every rule, for warm-up steps.
EXAMPLES: dict[str, Any] = {"logit_bias": {0: 1.0}, "bad_words_token_ids": ((0,), (0, 0)), "min_tokens": 2}


@dataclass(frozen=True, slots=True)
class TokenRules:
    """One request's rules, as token ids."""

    bias_ids: IntArray
    bias_values: npt.NDArray[np.float64]
    allowed_ids: IntArray  # empty: all
    forbidden_ids: IntArray
    phrases: tuple[IntArray, ...]  # bad words of two or more tokens
    min_tokens: int
    end_ids: IntArray  # end and stop tokens, forbidden until min_tokens
    begin_ids: IntArray  # forbidden as the first token of the output
    timestamps: tuple[int, ...]  # as `apply_timestamps` takes them; empty: no such rules

    @classmethod
    def of(cls, params: SamplingParams, eos_token_ids: Collection[int]) -> "TokenRules | None":
        """Return the rules of a request; None if it has none."""
        bad_words = params.bad_words_token_ids
        lists = params.logit_bias, params.allowed_token_ids, bad_words, params.begin_suppress_token_ids
        if not (any(lists) or params.min_tokens or params.timestamps):
            return None
        return cls(
            bias_ids=_ids(params.logit_bias.keys()),
            bias_values=np.fromiter(params.logit_bias.values(), np.float64),
            allowed_ids=_ids(params.allowed_token_ids),
            forbidden_ids=_ids(word[0] for word in bad_words if len(word) == 1),
            phrases=tuple(_ids(word) for word in bad_words if len(word) > 1),
            min_tokens=params.min_tokens,
            end_ids=_ids({*eos_token_ids, *params.stop_token_ids}),
            begin_ids=_ids(params.begin_suppress_token_ids),
            timestamps=_timestamp_values(params.timestamps) if params.timestamps else (),
        )


class PackedBias(NamedTuple):
    positions: int  # flat
    values: int  # float64


class PackedAllowed(NamedTuple):
    rows: int
    positions: int  # flat


class PackedPhrases(NamedTuple):
    """Bad words of two or more tokens."""

    last: int  # [phrases]: flat positions of their last tokens
    history: int  # [phrases, width]: flat positions in the token table of the tokens before the last one
    expected: int  # [phrases, width]: the tokens that complete the phrase if they are there
    width: int


class PackedTimestamps(NamedTuple):
    rows: int  # of logits
    values: int  # [NUM_VALUES, rows]
    width: int  # of the token table: that of the longest request


@dataclass(frozen=True, slots=True)
class PackedRules:
    """Staged indices of one step's rules; None if no row has such a rule. A flat position is row * vocab_size + id."""

    bias: PackedBias | None
    allowed: PackedAllowed | None
    forbidden: int | None  # flat positions
    phrases: PackedPhrases | None
    timestamps: PackedTimestamps | None


@dataclass(frozen=True, slots=True)
class _RuleRow:
    """A row of logits whose request has rules."""

    row: int
    history_start: int  # flat position of the request's first token in the token table
    num_tokens: int
    num_output_tokens: int
    rules: TokenRules


class RuleColumns:
    """The token rules of the slots that have some. Owned by `SamplingColumns`: the sampler applies them."""

    def __init__(self, tables: SlotTables, eos_token_ids: Collection[int]) -> None:
        self._tables = tables
        self._eos_token_ids = eos_token_ids
        self.by_slot: dict[int, TokenRules] = {}

    def add(self, request: NewRequestData, slot: int) -> None:
        rules = TokenRules.of(request.sampling_params, self._eos_token_ids)
        if rules is not None:
            self.by_slot[slot] = rules

    def remove(self, slot: int) -> None:
        self.by_slot.pop(slot, None)

    def lay_out_samples(self, slots: IntArray, positions: IntArray, packer: Packer) -> PackedRules | None:
        """Return the rules of samples in these slots, at these positions in their requests; None if no slot has any."""
        tables = self._tables
        rows = [
            _RuleRow(
                row=row,
                history_start=slot * tables.token_width,
                num_tokens=int(positions[row]),
                num_output_tokens=int(positions[row] - tables.num_prompt_tokens[slot]),
                rules=rules,
            )
            for row, slot in enumerate(slots.tolist())
            if (rules := self.by_slot.get(slot)) is not None
        ]
        return _pack_rules(rows, tables.vocab_size, packer) if rows else None


def _pack_rules(rows: list[_RuleRow], vocab_size: int, packer: Packer) -> PackedRules:
    with_bias = [r for r in rows if r.rules.bias_ids.size]
    with_allowed = [r for r in rows if r.rules.allowed_ids.size]
    forbidden = [r.row * vocab_size + ids for r in rows for ids in _forbidden(r)]
    phrases = [(r, phrase) for r in rows for phrase in r.rules.phrases if len(phrase) <= r.num_tokens + 1]
    return PackedRules(
        bias=PackedBias(
            packer.add(np.concatenate([r.row * vocab_size + r.rules.bias_ids for r in with_bias])),
            packer.add_floats(np.concatenate([r.rules.bias_values for r in with_bias])),
        )
        if with_bias
        else None,
        allowed=PackedAllowed(
            packer.add(_ids(r.row for r in with_allowed)),
            packer.add(np.concatenate([r.row * vocab_size + r.rules.allowed_ids for r in with_allowed])),
        )
        if with_allowed
        else None,
        forbidden=packer.add(np.concatenate(forbidden)) if forbidden else None,
        phrases=_pack_phrases(phrases, vocab_size, packer) if phrases else None,
        timestamps=_pack_timestamps([r for r in rows if r.rules.timestamps], packer),
    )


def _forbidden(row: _RuleRow) -> Iterable[IntArray]:
    if row.rules.forbidden_ids.size:
        yield row.rules.forbidden_ids
    if row.num_output_tokens < row.rules.min_tokens and row.rules.end_ids.size:
        yield row.rules.end_ids
    if row.num_output_tokens == 0 and row.rules.begin_ids.size:
        yield row.rules.begin_ids


def _pack_phrases(phrases: list[tuple[_RuleRow, IntArray]], vocab_size: int, packer: Packer) -> PackedPhrases:
    width = max(len(phrase) - 1 for _, phrase in phrases)
    last = _ids(row.row * vocab_size + phrase[-1] for row, phrase in phrases)
    expected = np.full((len(phrases), width), _ANY, np.int64)
    for index, (_, phrase) in enumerate(phrases):
        expected[index, width - len(phrase) + 1 :] = phrase[:-1]
    ends = _ids(row.history_start + row.num_tokens for row, _ in phrases)
    starts = _ids(row.history_start for row, _ in phrases)
    history = np.maximum(ends[:, None] + np.arange(-width, 0), starts[:, None])
    return PackedPhrases(packer.add(last), packer.add(history.reshape(-1)), packer.add(expected.reshape(-1)), width)


def _pack_timestamps(rows: Sequence[_RuleRow], packer: Packer) -> PackedTimestamps | None:
    if not rows:
        return None
    values = np.array([r.rules.timestamps for r in rows], np.int64).T
    return PackedTimestamps(
        packer.add(_ids(r.row for r in rows)), packer.add(values.reshape(-1)), max(r.num_tokens for r in rows)
    )


def _timestamp_values(rules: TimestampRules) -> tuple[int, ...]:
    most = _LARGEST_ID if rules.max_initial_index is None else rules.begin_id + rules.max_initial_index
    return rules.begin_id, rules.no_timestamps_id, rules.end_id, most


def _ids(values: Iterable[int]) -> IntArray:
    return np.fromiter(values, np.int64)
