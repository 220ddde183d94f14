"""A drafter that knows the outputs: its tokens are right with a given probability, and numbers of drafts may vary."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from unittest import mock

from torch import Tensor

from proa.contract import EngineCoreRequest
from proa_engine.core.speculation import SpeculatingRequest
from proa_engine.kernels.sampling.drafts import NONE, propose_ngrams_reference

VOCAB_SIZE = 250
# Ranges of running requests, with another number of drafts from each to the next, 0 again and again.
CHANGING = ((1, 1, 3), (2, 2, 0), (3, 3, 2), (4, 4, 0), (5, 5, 1), (6, 6, 0), (7, 64, 3))


class Oracle:
    """Proposes tokens of `sequences`, prompts with their outputs. What it proposes depends on the request's tokens
    alone."""

    def __init__(self, sequences: Sequence[Sequence[int]], share_of_right: float, *, varies: bool) -> None:
        """`varies`: it proposes fewer tokens than there is room for, or none."""
        self._sequences = [list(sequence) for sequence in sequences]
        self._share_of_right = share_of_right
        self._varies = varies

    def propose(
        self, rows: Tensor, token_ids: Tensor, lengths: Tensor, drafts: Tensor, *, min_ngram: int, max_ngram: int
    ) -> None:
        """Takes the place of `propose_ngrams`."""
        propose_ngrams_reference(rows, token_ids, lengths, drafts, min_ngram=min_ngram, max_ngram=max_ngram)
        for slot, num_tokens in zip(rows[0].tolist(), rows[2].tolist(), strict=True):
            if num_tokens > 1:
                length = int(lengths[slot])
                known = token_ids[slot, :length].tolist()
                proposed = self._draw(known, num_tokens - 1)
                drafts[slot] = NONE
                for place, token_id in enumerate(proposed):
                    drafts[slot, place] = token_id
                for place in range(num_tokens - 1):
                    token_ids[slot, length + place] = proposed[place] if place < len(proposed) else 0

    def _draw(self, known: list[int], most: int) -> list[int]:
        rng = random.Random(repr(known))
        count = rng.randint(0, most) if self._varies else most
        following = next((each[len(known) :] for each in self._sequences if each[: len(known)] == known), [])
        following += [0] * count  # behind the end, and of the made-up requests of a warm-up
        return [
            token_id if rng.random() < self._share_of_right else (token_id + 1) % VOCAB_SIZE
            for token_id in following[:count]
        ]


@contextmanager
def oracle_drafts(
    requests: Sequence[EngineCoreRequest],
    outputs: Mapping[str, Sequence[int]],
    share_of_right: float = 0.7,
    *,
    varies: bool = False,
) -> Iterator[None]:
    """Engines in this process draft tokens of these outputs, by request id."""
    sequences = [[*each.prompt_token_ids, *outputs[each.request_id]] for each in requests]
    oracle = Oracle(sequences, share_of_right, varies=varies)
    with mock.patch("proa_engine.step.drafts.propose_ngrams", oracle.propose):
        yield


@contextmanager
def varied_room() -> Iterator[None]:
    """Rows have room for another number of drafts in every step, from none to the most."""
    most = vars(SpeculatingRequest)["num_uncomputed_tokens"]

    def vary(request: SpeculatingRequest) -> int:
        num_tokens: int = most.__get__(request)
        if request.num_planned_tokens - request.num_computed_tokens > 1 or num_tokens < 2:
            return num_tokens
        rng = random.Random(f"{request.request_id} {request.num_computed_tokens} {request.num_tokens}")
        return rng.choice([1, min(2, num_tokens), num_tokens])

    with mock.patch.object(SpeculatingRequest, "num_uncomputed_tokens", property(vary)):
        yield
