"""Beam search: which continuations of a prompt survive each step, for the gateway and the offline `LLM`.

    search = BeamSearch(BeamSearchParams(beam_width=4, max_tokens=16), num_prompt_tokens=9, eos_token_ids=(2,))
    while not search.is_finished:
        search.advance(...)  # the likeliest next tokens of each of `search.beams`
    search.best()

The rules are vLLM's. In a step each beam proposes its `2 * beam_width` likeliest tokens. An end-of-sequence token
completes a beam, whatever its rank; of the other proposals the `beam_width` likeliest become the next beams. At the end
the completed beams and the last ones are ordered by score, the log probability divided by
`length ** length_penalty`, where the length counts the prompt too and a last end-of-sequence token not.

Where transformers' `generate(num_beams=…)` differs: its length counts the output alone; an end-of-sequence token
completes a beam only among the `num_beams` likeliest proposals of the step; and with its default
`early_stopping=False` it ends by a heuristic. vLLM always computes `max_tokens` steps. Here a search ends as soon as no
beam can reach a better score than the `beam_width` best completed ones, which gives the same result.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from proa.contract import TokenLogprobs

MAX_LENGTH_PENALTY = 10.0
"""Of either sign. Powers of lengths with larger ones are no floats."""


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """`temperature` has no effect: beams are ranked by the model's own probabilities, as in vLLM.
    `include_stop_str_in_output`: the text has that of the end-of-sequence token. Raises `ValueError`."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if not abs(self.length_penalty) <= MAX_LENGTH_PENALTY:
            raise ValueError(
                f"length_penalty must be from -{MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}, "
                f"got {self.length_penalty}"
            )

    @property
    def num_logprobs(self) -> int:
        """Number of likeliest tokens that `BeamSearch.advance` needs of each beam."""
        return 2 * self.beam_width


@dataclass(frozen=True, slots=True)
class Beam:
    """An output. `logprobs`: one for each of `token_ids`. `eos_token_id`: the last token, if it completed the beam;
    None: the beam was not completed."""

    token_ids: tuple[int, ...] = ()
    cumulative_logprob: float = 0.0
    logprobs: tuple[TokenLogprobs, ...] = ()
    eos_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class _Proposal:
    beam: Beam
    token_id: int
    logprob: float
    rank: int
    entry: TokenLogprobs

    @property
    def cumulative_logprob(self) -> float:
        return self.beam.cumulative_logprob + self.logprob

    def accepted(self, *, completes: bool) -> Beam:
        beam, entry = self.beam, self.entry
        own = TokenLogprobs(self.token_id, self.logprob, self.rank, entry.top_token_ids, entry.top_logprobs)
        return Beam(
            (*beam.token_ids, self.token_id),
            self.cumulative_logprob,
            (*beam.logprobs, own),
            self.token_id if completes else None,
        )


class BeamSearch:
    """The search for one prompt. `beams`: those that the next step continues, at first one without tokens."""

    def __init__(
        self,
        params: BeamSearchParams,
        *,
        num_prompt_tokens: int,
        eos_token_ids: Collection[int],
        max_model_len: int | None = None,
    ) -> None:
        """`max_model_len`: of prompt and output together; outputs end there. None: no limit."""
        room = params.max_tokens if max_model_len is None else max_model_len - num_prompt_tokens
        self._params = params
        self._num_prompt_tokens = num_prompt_tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        self._num_steps = max(0, min(params.max_tokens, room))
        self._completed: list[Beam] = []  # the best `beam_width`, best first; of equal ones the earlier first
        self.num_steps_done = 0
        self.beams: Sequence[Beam] = (Beam(),)

    @property
    def is_finished(self) -> bool:
        """Whether `best` is known. `advance` must not be called then."""
        if self.num_steps_done == self._num_steps or not self.beams:
            return True
        if len(self._completed) < self._params.beam_width:
            return False
        worst = self._score(self._completed[-1])
        return all(self._bound(beam) <= worst for beam in self.beams)

    def advance(self, entries: Sequence[TokenLogprobs]) -> None:
        """Do a step. `entries`: of each of `beams` its likeliest next tokens, `num_logprobs` of them or, of a smaller
        vocabulary, all; more are not used."""
        assert not self.is_finished
        params, proposals = self._params, list[_Proposal]()
        for beam, entry in zip(self.beams, entries, strict=True):
            pairs = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
            for rank, (token_id, logprob) in enumerate(list(pairs)[: params.num_logprobs], start=1):
                proposal = _Proposal(beam, token_id, logprob, rank, entry)
                if token_id in self._eos_token_ids and not params.ignore_eos:
                    self._completed.append(proposal.accepted(completes=True))
                else:
                    proposals.append(proposal)
        self._completed = self._ordered(self._completed)
        proposals.sort(key=lambda proposal: -proposal.cumulative_logprob)
        self.beams = [proposal.accepted(completes=False) for proposal in proposals[: params.beam_width]]
        self.num_steps_done += 1

    def best(self) -> list[Beam]:
        """The `beam_width` best outputs, the best first; fewer if the vocabulary is smaller."""
        return self._ordered([*self._completed, *self.beams])

    def _ordered(self, beams: Sequence[Beam]) -> list[Beam]:
        return sorted(beams, key=self._score, reverse=True)[: self._params.beam_width]

    def _score(self, beam: Beam) -> float:
        has_end = bool(beam.token_ids) and beam.token_ids[-1] in self._eos_token_ids
        return self._normalized(beam.cumulative_logprob, len(beam.token_ids) - has_end)

    def _bound(self, beam: Beam) -> float:
        """The best score that an output which continues `beam` can have: its log probability can only fall, so the
        best length is the largest one or, without a positive penalty, the present one."""
        length = self._num_steps if self._params.length_penalty > 0 else len(beam.token_ids)
        return self._normalized(beam.cumulative_logprob, length)

    def _normalized(self, cumulative_logprob: float, num_output_tokens: int) -> float:
        length: float = (self._num_prompt_tokens + num_output_tokens) ** self._params.length_penalty
        return cumulative_logprob / length
