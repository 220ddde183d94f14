"""Which rows of a step are sampled, how, and whose log probabilities are wanted: index arrays for the sampler.

Pure host work, numpy over all rows at once. Knows the InputBatch's columns, not its device tables.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from proa_engine.worker.input_batch import InputBatch
from proa_engine.worker.staging import IntArray, Packer
from proa_engine.worker.token_rules import PackedRules, RuleRow, pack_rules


@dataclass(frozen=True, slots=True)
class Rows:
    """A step's rows on the host: request `i` computes its tokens `starts[i]` up to `ends[i]`."""

    request_ids: list[str]
    slots: IntArray
    starts: IntArray
    ends: IntArray
    query_start_loc: IntArray


@dataclass(frozen=True, slots=True)
class Samples:
    """The tokens that a step samples, in order."""

    rows: IntArray  # of the step
    positions: IntArray  # index that each takes in its request
    hidden_rows: IntArray  # row of the hidden states


def last_samples(rows: Rows, sampled: IntArray) -> Samples:
    """One behind each of these rows' ends."""
    return Samples(sampled, rows.ends[sampled], rows.query_start_loc[1:][sampled] - 1)


@dataclass(frozen=True, slots=True)
class RowSet:
    """Some of a set of rows: how many, and where their numbers were packed; `place` is None when it is all of them."""

    count: int
    place: int | None


@dataclass(frozen=True, slots=True)
class PromptLogprobRows:
    """Prompt positions whose next token's log probability is wanted, over all requests that ask."""

    hidden_rows: int  # place: row of the hidden states
    targets: int  # place: flat position of the next token in the token table
    requests: list[tuple[str, int, int]]  # request id, number of positions, number of likeliest tokens wanted


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Which tokens are sampled in this step, a row of logits each, and the sampler's features that they use."""

    num_rows: int
    is_whole_batch: bool  # behind every token of the step one is sampled: no gathering
    hidden_rows: int  # place
    slots: int  # place
    positions: int  # place: index that the new token takes in its request
    write_to: int  # place: the same, flat in the token table
    max_num_tokens: int
    penalized: RowSet
    logprobs: RowSet
    random: RowSet
    min_p: RowSet  # of the random rows
    limited: RowSet  # of the random rows: top-k or top-p
    rules: PackedRules | None


def sampling_inputs(rows: Rows, samples: Samples, batch: InputBatch, vocab_size: int, packer: Packer) -> SamplingInputs:
    slots = rows.slots[samples.rows]
    positions = samples.positions
    is_random = batch.is_random[slots]
    return SamplingInputs(
        num_rows=slots.size,
        is_whole_batch=slots.size == rows.query_start_loc[-1],
        hidden_rows=packer.add(samples.hidden_rows),
        slots=packer.add(slots),
        positions=packer.add(positions),
        write_to=packer.add(slots * batch.token_width + positions),
        max_num_tokens=int(positions.max()),
        penalized=_row_set(batch.has_penalties[slots], packer),
        logprobs=_row_set(batch.num_logprobs[slots] >= 0, packer),
        random=_row_set(is_random, packer),
        min_p=_row_set(batch.has_min_p[slots[is_random]], packer),
        limited=_row_set(batch.has_top_k_top_p[slots[is_random]], packer),
        rules=_pack_rules(slots, positions, batch, vocab_size, packer) if batch.rules else None,
    )


def _row_set(mask: npt.NDArray[np.bool_], packer: Packer) -> RowSet:
    count = int(np.count_nonzero(mask))
    return RowSet(count, packer.add(np.flatnonzero(mask)) if 0 < count < mask.size else None)


def _pack_rules(
    slots: IntArray, positions: IntArray, batch: InputBatch, vocab_size: int, packer: Packer
) -> PackedRules | None:
    rule_rows = (
        RuleRow(
            row=row,
            history_start=slot * batch.token_width,
            num_tokens=int(positions[row]),
            num_output_tokens=int(positions[row] - batch.num_prompt_tokens[slot]),
            rules=rules,
        )
        for row, slot in enumerate(slots.tolist())
        if (rules := batch.rules.get(slot)) is not None
    )
    return pack_rules(rule_rows, vocab_size, packer)


def num_logprobs(rows: Rows, sampled: IntArray, batch: InputBatch) -> dict[str, int]:
    wanted = batch.num_logprobs[rows.slots[sampled]]
    with_logprobs = sampled[wanted >= 0]
    names = (rows.request_ids[row] for row in with_logprobs.tolist())
    return dict(zip(names, wanted[wanted >= 0].tolist(), strict=True))


def prompt_logprob_rows(rows: Rows, batch: InputBatch, packer: Packer) -> PromptLogprobRows | None:
    num_positions = np.minimum(rows.ends, batch.num_prompt_tokens[rows.slots] - 1) - rows.starts
    wanted = np.flatnonzero((batch.num_prompt_logprobs[rows.slots] >= 0) & (num_positions > 0))
    if not wanted.size:
        return None
    hidden_rows, targets, requests = [], [], []
    for row in wanted.tolist():
        count = int(num_positions[row])
        slot = int(rows.slots[row])
        first_target = slot * batch.token_width + int(rows.starts[row]) + 1
        hidden_rows.append(np.arange(rows.query_start_loc[row], rows.query_start_loc[row] + count))
        targets.append(np.arange(first_target, first_target + count))
        requests.append((rows.request_ids[row], count, int(batch.num_prompt_logprobs[slot])))
    return PromptLogprobRows(packer.add(np.concatenate(hidden_rows)), packer.add(np.concatenate(targets)), requests)
