"""vLLM's beam search, written as it is there, without an end before the last step."""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from proa.beam_search import BeamSearchParams

NextLogprobs = Callable[[Sequence[int]], Sequence[tuple[int, float]]]
"""The likeliest tokens after these of prompt and output, the best first, with their log probabilities."""


class Found(NamedTuple):
    tokens: tuple[int, ...]  # of the output
    cumulative_logprob: float


def search(
    params: BeamSearchParams, prompt: Sequence[int], next_logprobs: NextLogprobs, eos_token_ids: Collection[int]
) -> list[Found]:
    """The `beam_width` best outputs, the best first."""

    def score(found: Found) -> float:
        length = len(prompt) + len(found.tokens)
        length -= bool(found.tokens) and found.tokens[-1] in eos_token_ids
        power: float = length**params.length_penalty
        return found.cumulative_logprob / power

    beams, completed = [Found((), 0.0)], list[Found]()
    for _ in range(params.max_tokens):
        proposals: list[Found] = []
        for beam in beams:
            for token_id, logprob in next_logprobs([*prompt, *beam.tokens])[: 2 * params.beam_width]:
                found = Found((*beam.tokens, token_id), beam.cumulative_logprob + logprob)
                (completed if token_id in eos_token_ids and not params.ignore_eos else proposals).append(found)
        beams = sorted(proposals, key=lambda found: found.cumulative_logprob, reverse=True)[: params.beam_width]
    return sorted([*completed, *beams], key=score, reverse=True)[: params.beam_width]
