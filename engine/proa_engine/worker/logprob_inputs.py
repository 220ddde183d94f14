"""For which rows of a step log probabilities are requested, of samples and of prompt tokens. Host work."""

from dataclasses import dataclass

import numpy as np

from proa_engine.core.types import NewRequestData
from proa_engine.worker.columns import Columns, Rows
from proa_engine.worker.sampling_inputs import RowSet
from proa_engine.worker.staging import IntArray, Packer


@dataclass(frozen=True, slots=True)
class LogprobTokenIds:
    """The tokens whose log probabilities requests name, [rows with log probabilities, width], padded with zeros."""

    index: int  # staged
    width: int


@dataclass(frozen=True, slots=True)
class PromptLogprobRows:
    """Prompt positions whose next token's log probability is requested, over all requests."""

    hidden_rows: int  # staged index: row of the hidden states
    targets: int  # staged index: flat position of the next token in the token table
    requests: list[tuple[str, int, int]]  # request id, number of positions, number of top tokens


class LogprobColumns(Columns):
    def __init__(self, max_num_seqs: int) -> None:
        self._num_tops = np.full(max_num_seqs, -1, np.int64)  # -1: not requested
        self._num_prompt_tops = np.full(max_num_seqs, -1, np.int64)
        self._token_ids: dict[int, tuple[int, ...]] = {}  # only slots that name any

    def add(self, slot: int, request: NewRequestData) -> None:
        params = request.sampling_params
        self._num_tops[slot] = -1 if params.logprobs is None else params.logprobs
        self._num_prompt_tops[slot] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        if params.logprob_token_ids:
            self._token_ids[slot] = params.logprob_token_ids

    def remove(self, slot: int) -> None:
        self._token_ids.pop(slot, None)

    def lay_out(self, slots: IntArray, packer: Packer) -> tuple[RowSet, LogprobTokenIds | None]:
        """The rows of samples with these slots that need log probabilities, and the tokens that these rows name."""
        has_logprobs = self._num_tops[slots] >= 0
        return RowSet.of(has_logprobs, packer), self._pack_token_ids(slots[has_logprobs], packer)

    def num_tops(self, rows: Rows, sampled: IntArray) -> dict[str, int]:
        """Request id -> number of top tokens, for the sampled rows that request log probabilities."""
        counts = self._num_tops[rows.slots[sampled]]
        if (counts < 0).all():
            return {}
        request_ids = (rows.request_ids[row] for row in sampled[counts >= 0].tolist())
        return dict(zip(request_ids, counts[counts >= 0].tolist(), strict=True))

    def token_ids(self, rows: Rows, sampled: IntArray) -> dict[str, tuple[int, ...]]:
        """Request id -> the tokens that it names, for the sampled rows that name any."""
        if not self._token_ids:
            return {}
        named = ((row, self._token_ids.get(int(rows.slots[row]))) for row in sampled.tolist())
        return {rows.request_ids[row]: token_ids for row, token_ids in named if token_ids}

    def lay_out_prompts(
        self, rows: Rows, num_prompt_tokens: IntArray, token_width: int, packer: Packer
    ) -> PromptLogprobRows | None:
        """None if no prompt token of the step needs its log probability. `num_prompt_tokens` [rows]. `token_width`: of
        the token table."""
        num_positions = np.minimum(rows.ends, num_prompt_tokens - 1) - rows.starts
        with_logprobs = np.flatnonzero((self._num_prompt_tops[rows.slots] >= 0) & (num_positions > 0))
        if not with_logprobs.size:
            return None
        hidden_rows, targets, requests = [], [], []
        for row in with_logprobs.tolist():
            count, slot = int(num_positions[row]), int(rows.slots[row])
            first_target = slot * token_width + int(rows.starts[row]) + 1
            hidden_rows.append(np.arange(rows.query_start_loc[row], rows.query_start_loc[row] + count))
            targets.append(np.arange(first_target, first_target + count))
            requests.append((rows.request_ids[row], count, int(self._num_prompt_tops[slot])))
        return PromptLogprobRows(packer.add(np.concatenate(hidden_rows)), packer.add(np.concatenate(targets)), requests)

    def _pack_token_ids(self, slots: IntArray, packer: Packer) -> LogprobTokenIds | None:
        rows = [self._token_ids.get(slot, ()) for slot in slots.tolist()] if self._token_ids else []
        width = max(map(len, rows), default=0)
        if not width:
            return None
        padded = np.zeros((len(rows), width), np.int64)
        for row, token_ids in zip(padded, rows, strict=True):
            row[: len(token_ids)] = token_ids
        return LogprobTokenIds(packer.add(padded.reshape(-1)), width)
