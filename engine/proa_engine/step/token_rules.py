"""RuleColumns: logit bias, allowed tokens, bad words and the minimum length, as flat positions in a step's logits.

The host turns the rules of the samples that have some into index arrays; the sampler applies them to all at once.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from proa.contract import SamplingParams
from proa_engine.core.types import NewRequestData
from proa_engine.step.columns import Columns
from proa_engine.step.slots import Edits, SlotTables
from proa_engine.step.staging import IntArray, Packer

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

    @classmethod
    def of(cls, params: SamplingParams, eos_token_ids: Collection[int]) -> "TokenRules | None":
        """Return the rules of a request; None if it has none."""
        bad_words = params.bad_words_token_ids
        if not (params.logit_bias or params.allowed_token_ids or bad_words or params.min_tokens):
            return None
        return cls(
            bias_ids=_ids(params.logit_bias.keys()),
            bias_values=np.fromiter(params.logit_bias.values(), np.float64),
            allowed_ids=_ids(params.allowed_token_ids),
            forbidden_ids=_ids(word[0] for word in bad_words if len(word) == 1),
            phrases=tuple(_ids(word) for word in bad_words if len(word) > 1),
            min_tokens=params.min_tokens,
            end_ids=_ids({*eos_token_ids, *params.stop_token_ids}),
        )


@dataclass(frozen=True, slots=True)
class PackedRules:
    """Staged indices of one step's rules; None if no row has such a rule. A flat position is row * vocab_size + id."""

    bias: tuple[int, int] | None  # flat positions, values
    allowed: tuple[int, int] | None  # rows, flat positions
    forbidden: int | None  # flat positions
    # Flat positions of last tokens [phrases]; then, [phrases, phrase_width]: flat positions in the token table of the
    # tokens before them, and the tokens expected there.
    phrases: tuple[int, int, int] | None
    phrase_width: int


@dataclass(frozen=True, slots=True)
class _RuleRow:
    """A row of logits whose request has rules."""

    row: int
    history_start: int  # flat position of the request's first token in the token table
    num_tokens: int
    num_output_tokens: int
    rules: TokenRules


class RuleColumns(Columns):
    """The token rules of the slots that have some."""

    def __init__(self, tables: SlotTables, eos_token_ids: Collection[int]) -> None:
        self._tables = tables
        self._eos_token_ids = eos_token_ids
        self._rules: dict[int, TokenRules] = {}  # by slot

    def add(self, request: NewRequestData, slot: int, edits: Edits) -> None:
        rules = TokenRules.of(request.sampling_params, self._eos_token_ids)
        if rules is not None:
            self._rules[slot] = rules

    def remove(self, slot: int) -> None:
        self._rules.pop(slot, None)

    def lay_out_samples(self, slots: IntArray, positions: IntArray, packer: Packer) -> PackedRules | None:
        """Return the rules of samples in these slots, at these positions in their requests; None if no slot has any."""
        if not self._rules:
            return None
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
            if (rules := self._rules.get(slot)) is not None
        ]
        return _pack_rules(rows, tables.vocab_size, packer) if rows else None


def _pack_rules(rows: list[_RuleRow], vocab_size: int, packer: Packer) -> PackedRules:
    with_bias = [r for r in rows if r.rules.bias_ids.size]
    with_allowed = [r for r in rows if r.rules.allowed_ids.size]
    forbidden = [r.row * vocab_size + ids for r in rows for ids in _forbidden(r)]
    phrases = [(r, phrase) for r in rows for phrase in r.rules.phrases if len(phrase) <= r.num_tokens + 1]
    width = max((len(phrase) - 1 for _, phrase in phrases), default=0)
    return PackedRules(
        bias=(
            packer.add(np.concatenate([r.row * vocab_size + r.rules.bias_ids for r in with_bias])),
            packer.add_floats(np.concatenate([r.rules.bias_values for r in with_bias])),
        )
        if with_bias
        else None,
        allowed=(
            packer.add(_ids(r.row for r in with_allowed)),
            packer.add(np.concatenate([r.row * vocab_size + r.rules.allowed_ids for r in with_allowed])),
        )
        if with_allowed
        else None,
        forbidden=packer.add(np.concatenate(forbidden)) if forbidden else None,
        phrases=_pack_phrases(phrases, width, vocab_size, packer) if phrases else None,
        phrase_width=width,
    )


def _forbidden(row: _RuleRow) -> Iterable[IntArray]:
    if row.rules.forbidden_ids.size:
        yield row.rules.forbidden_ids
    if row.num_output_tokens < row.rules.min_tokens and row.rules.end_ids.size:
        yield row.rules.end_ids


def _pack_phrases(
    phrases: list[tuple[_RuleRow, IntArray]], width: int, vocab_size: int, packer: Packer
) -> tuple[int, int, int]:
    last = _ids(row.row * vocab_size + phrase[-1] for row, phrase in phrases)
    expected = np.full((len(phrases), width), _ANY, np.int64)
    for index, (_, phrase) in enumerate(phrases):
        expected[index, width - len(phrase) + 1 :] = phrase[:-1]
    ends = _ids(row.history_start + row.num_tokens for row, _ in phrases)
    starts = _ids(row.history_start for row, _ in phrases)
    history = np.maximum(ends[:, None] + np.arange(-width, 0), starts[:, None])
    return packer.add(last), packer.add(history.reshape(-1)), packer.add(expected.reshape(-1))


def _ids(values: Iterable[int]) -> IntArray:
    return np.fromiter(values, np.int64)
