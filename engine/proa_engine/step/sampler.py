"""Sampler: logits to tokens. Each operation runs once over all rows that need it, and is skipped if none does.

Log probabilities are of the model's own distribution, before any operation. Then, in this order: logit bias, penalties,
forbidden tokens (allowed ids, bad words, minimum length), timestamps, masks of grammars, temperature, min-p, top-k,
top-p, Gumbel noise. On a GPU everything from temperature on is one kernel, and nothing synchronizes with the host.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from proa_engine.core.grammar import GrammarMasks
from proa_engine.kernels.sampling import sampling_params as columns
from proa_engine.kernels.sampling import sampling_reference as sampling
from proa_engine.kernels.sampling.draw_tokens import draw_decodes, draw_tokens
from proa_engine.kernels.sampling.penalties import penalize, penalize_reference
from proa_engine.kernels.sampling.sampling_params import LIMITS, SamplingOperation
from proa_engine.kernels.sampling.timestamps import NUM_VALUES, apply_timestamps
from proa_engine.kernels.sampling.token_bitmask import token_bitmask
from proa_engine.step.input_batch import InputBatch
from proa_engine.step.logprobs import LogprobInputs, LogprobTensors
from proa_engine.step.sampling import SamplingInputs
from proa_engine.step.staging import PackedArrays, RowSet, Staging
from proa_engine.step.token_rules import PackedRules, PackedTimestamps


@dataclass(frozen=True, slots=True)
class SampledTokens:
    token_ids: Tensor  # [rows] int64
    logprobs: LogprobTensors | None  # of the rows that request them


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The masks of a step's constrained rows on the device, as `kernels.sampling.token_bitmask` takes them."""

    rows: Tensor  # [masked rows] int64: rows of logits
    bits: Tensor  # [masked rows, words] int32


def ship_masks(masks: GrammarMasks, sampling: SamplingInputs, staging: Staging) -> TokenMasks:
    """Copy a step's masks to its device, without waiting for the copy if their memory is pinned.

    Every masked row must sample exactly one token; other rows may sample several, to verify drafts.
    """
    samples = sampling.rows.searchsorted(masks.rows) + masks.places
    assert np.array_equal(sampling.rows[samples], masks.rows), "a masked row samples no token"
    (on_device,) = staging.ship(PackedArrays(samples, [samples.size]))
    bits = torch.frombuffer(masks.bits, dtype=torch.int32).view(samples.size, -1)
    return TokenMasks(on_device, bits.to(on_device.device, non_blocking=True))


class Sampler:
    """Samples a step's tokens. Every row with log probabilities gets those of the `num_top` most likely tokens,
    whatever number its request has, so that its result does not depend on other rows."""

    def __init__(self, batch: InputBatch, num_top: int) -> None:
        self._params = batch.sampling.params
        self._tables = batch.tables
        self._num_top = num_top

    def sample(
        self, logits: Tensor, inputs: SamplingInputs, arrays: Sequence[Tensor], masks: TokenMasks | None = None
    ) -> SampledTokens:
        """Sample a token for each row of logits, [rows, vocab] in any float type, which may be overwritten.

        `arrays` are the step's staged arrays.
        """
        penalized = inputs.needs[SamplingOperation.PENALTIES]
        raw = None if inputs.logprobs is None else _take(logits, inputs.logprobs.rows, arrays).clone()
        if inputs.rules is not None or logits.is_cpu:
            logits = logits.float().contiguous()  # a sharded vocabulary cut to its true size is not contiguous
        if inputs.rules is not None:
            self._apply_bias(logits, inputs.rules, arrays)
        if penalized.count:
            logits = self._penalize(logits, inputs, penalized, arrays)
        if inputs.rules is not None:
            self._forbid(logits, inputs.rules, arrays)
            if inputs.rules.timestamps:
                self._apply_timestamps(logits, inputs, inputs.rules.timestamps, arrays)
        if masks is not None:
            token_bitmask(logits, masks.rows, masks.bits)
        token_ids = self._choose(logits, inputs, arrays)
        if raw is None or inputs.logprobs is None:
            return SampledTokens(token_ids, None)
        return SampledTokens(token_ids, self._logprobs(raw, token_ids, inputs.logprobs, arrays))

    def draw_decodes(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Sample a token for each decode whose sampling `is_plain`, and write it to the token table. Returns the tokens
        of `sample`, [rows] int64.

        `rows` [3, rows] are columns of `pad_rows`. Can be captured: everything else is read from the device's tables.
        """
        return draw_decodes(logits, self._params, rows, self._tables.token_ids)

    def _choose(self, logits: Tensor, inputs: SamplingInputs, arrays: Sequence[Tensor]) -> Tensor:
        """Draw a token for each row of processed logits, [rows] int64; the most likely one if the temperature is 0."""
        slots, positions = arrays[inputs.slots], arrays[inputs.positions]
        if not logits.is_cpu:
            has_limits = any(inputs.needs[operation].count for operation in LIMITS)
            return draw_tokens(logits, self._params, slots, positions, has_limits=has_limits)
        random = inputs.random
        if random.count == 0:
            return sampling.greedy(logits)
        params = self._params.index_select(0, _take(slots, random, arrays))  # [random rows, NUM_COLUMNS]
        scaled = _take(logits, random, arrays) / params[:, columns.TEMPERATURE, None].float()
        for operation in LIMITS:
            rows = inputs.needs[operation]
            if rows.count:
                part, limits = _take(scaled, rows, arrays), _take(params, rows, arrays)
                if operation is SamplingOperation.MIN_P:
                    sampling.apply_min_p(part, limits[:, columns.MIN_P].float())
                else:
                    sampling.apply_top_k_top_p(part, limits[:, columns.TOP_K].long(), limits[:, columns.TOP_P].float())
                scaled = _put(scaled, rows, arrays, part)
        # Unsigned words as int32 with the same bits.
        key_lo, key_hi = (params[:, column].long().int() for column in (columns.KEY_LO, columns.KEY_HI))
        drawn = sampling.sample(scaled, key_lo, key_hi, _take(positions, random, arrays).int())
        return drawn if random.index is None else _put(sampling.greedy(logits), random, arrays, drawn)

    def _penalize(self, logits: Tensor, inputs: SamplingInputs, rows: RowSet, arrays: Sequence[Tensor]) -> Tensor:
        """Return float32 logits."""
        tables, batch = (self._tables.token_ids, self._params), (arrays[inputs.slots], arrays[inputs.positions])
        if not logits.is_cpu:
            return penalize(logits, *tables, *batch, inputs.max_num_tokens)
        part, slots, num_tokens = (_take(each, rows, arrays) for each in (logits, *batch))
        penalized = penalize_reference(part, *tables, slots, num_tokens, inputs.max_num_tokens)
        return _put(logits, rows, arrays, penalized)

    def _apply_bias(self, logits: Tensor, rules: PackedRules, arrays: Sequence[Tensor]) -> None:
        if rules.bias is not None:
            values = arrays[rules.bias.values].view(torch.float64).float()
            logits.view(-1).index_add_(0, arrays[rules.bias.positions], values)

    def _forbid(self, logits: Tensor, rules: PackedRules, arrays: Sequence[Tensor]) -> None:
        flat = logits.view(-1)
        if rules.allowed is not None:
            rows, positions = arrays[rules.allowed.rows], arrays[rules.allowed.positions]
            kept = flat[positions]
            logits.index_fill_(0, rows, -math.inf)
            flat.index_copy_(0, positions, kept)
        if rules.forbidden is not None:
            flat.index_fill_(0, arrays[rules.forbidden], -math.inf)
        if rules.phrases is not None:
            last, expected = arrays[rules.phrases.last], arrays[rules.phrases.expected]
            tokens = self._tables.flat_token_ids[arrays[rules.phrases.history]]
            completes = ((tokens == expected) | (expected < 0)).view(-1, rules.phrases.width).all(1)
            flat.index_add_(0, last, torch.zeros_like(last, dtype=flat.dtype).masked_fill_(completes, -math.inf))

    def _apply_timestamps(
        self, logits: Tensor, inputs: SamplingInputs, packed: PackedTimestamps, arrays: Sequence[Tensor]
    ) -> None:
        rows = arrays[packed.rows]
        slots, positions = (arrays[index].index_select(0, rows) for index in (inputs.slots, inputs.positions))
        part = logits.index_select(0, rows)
        apply_timestamps(
            part,
            self._tables.token_ids[:, : packed.width].index_select(0, slots),
            self._params.index_select(0, slots)[:, columns.NUM_PROMPT].long(),
            positions,
            arrays[packed.values].view(NUM_VALUES, -1),
        )
        logits.index_copy_(0, rows, part)

    def _logprobs(
        self, raw: Tensor, token_ids: Tensor, inputs: LogprobInputs, arrays: Sequence[Tensor]
    ) -> LogprobTensors:
        """Return the log probabilities of the rows of `inputs`. `raw` are these rows' logits before any operation."""
        raw, chosen = raw.float(), _take(token_ids, inputs.rows, arrays)
        logprobs = LogprobTensors(chosen, *sampling.token_logprobs(raw, chosen, self._num_top))
        if (named := inputs.named_tokens) is None:
            return logprobs
        return replace(logprobs, named=sampling.named_logprobs(raw, arrays[named.index].view(-1, named.width)))


def _take(tensor: Tensor, rows: RowSet, arrays: Sequence[Tensor]) -> Tensor:
    """Return the rows of `tensor` that are in the set `rows`; `tensor` itself if all are."""
    return tensor if rows.index is None else tensor.index_select(0, arrays[rows.index])


def _put(tensor: Tensor, rows: RowSet, arrays: Sequence[Tensor], values: Tensor) -> Tensor:
    """Replace the rows of `tensor` that are in the set `rows` with `values`, in place; returns the result, which is
    `values` if all are."""
    return values if rows.index is None else tensor.index_copy_(0, arrays[rows.index], values)
