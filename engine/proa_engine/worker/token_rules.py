"""TokenRules: what a request says about single tokens, as flat positions in its batch's logits.

Logit bias, allowed tokens, bad words and the minimum length. Only requests that have such rules are looked at, and
only the host is: the sampler gets index arrays and applies them to all rows at once.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from proa.contract import SamplingParams
from proa_engine.worker.staging import IntArray, Packer

_ANY = -1  # stands before the start of a bad word that is shorter than the longest


@dataclass(frozen=True, slots=True)
class TokenRules:
    """One request's rules, ready to be moved to its row."""

    bias_ids: IntArray
    bias_values: npt.NDArray[np.float64]
    allowed_ids: IntArray  # empty: all
    forbidden_ids: IntArray
    phrases: tuple[IntArray, ...]  # bad words of two tokens and more
    min_tokens: int
    end_ids: IntArray  # what min_tokens forbids

    @classmethod
    def of(cls, params: SamplingParams, eos_token_ids: Collection[int]) -> "TokenRules | None":
        """The rules of a request; None where it has none."""
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
    """Places in the packer of one step's rules; None where no row has such a rule. Flat: row * vocab_size + id."""

    bias: tuple[int, int] | None  # flat positions, values
    allowed: tuple[int, int] | None  # rows, flat positions
    forbidden: int | None  # flat positions
    phrases: tuple[int, int, int] | None  # flat positions of last tokens; places before them; tokens expected there
    phrase_width: int  # the latter two are [phrases, phrase_width]


@dataclass(frozen=True, slots=True)
class RuleRow:
    """Where a request with rules stands in this step."""

    row: int
    history_start: int  # flat position of the request's first token in the token table
    num_tokens: int
    num_output_tokens: int
    rules: TokenRules


def pack_rules(rows: Iterable[RuleRow], vocab_size: int, packer: Packer) -> PackedRules | None:
    """Put the rules of a step's rows into the packer; None where there are none."""
    rows = list(rows)
    if not rows:
        return None
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


def _forbidden(row: RuleRow) -> Iterable[IntArray]:
    if row.rules.forbidden_ids.size:
        yield row.rules.forbidden_ids
    if row.num_output_tokens < row.rules.min_tokens and row.rules.end_ids.size:
        yield row.rules.end_ids


def _pack_phrases(
    phrases: list[tuple[RuleRow, IntArray]], width: int, vocab_size: int, packer: Packer
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
