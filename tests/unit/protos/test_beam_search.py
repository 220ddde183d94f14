"""Beam search: vLLM's results, in as few steps as they take."""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from proa.beam_search import Beam, BeamSearch, BeamSearchParams
from proa.contract import TokenLogprobs
from support.beams import Found, search

EOS = (0, 1)
PROMPT = (7, 7, 7)


class RandomModel:
    """Draws the probabilities of the next token from the tokens before it."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed = seed
        self._vocab_size = vocab_size

    def next_logprobs(self, tokens: Sequence[int]) -> list[tuple[int, float]]:
        draw = random.Random(f"{self._seed} {tokens}")
        weights = [math.exp(draw.gauss(0, 2)) for _ in range(self._vocab_size)]
        pairs = [(token_id, math.log(weight / sum(weights))) for token_id, weight in enumerate(weights)]
        return sorted(pairs, key=lambda pair: -pair[1])

    def entry(self, tokens: Sequence[int], count: int) -> TokenLogprobs:
        pairs = self.next_logprobs(tokens)[:count]
        ids, logprobs = zip(*pairs, strict=True)
        return TokenLogprobs(ids[0], logprobs[0], 1, ids, logprobs)


def run(model: RandomModel, params: BeamSearchParams, extra: int = 0) -> tuple[list[Beam], int]:
    """The result and the number of steps."""
    found = BeamSearch(params, num_prompt_tokens=len(PROMPT), eos_token_ids=EOS)
    while not found.is_finished:
        found.advance([model.entry([*PROMPT, *beam.token_ids], params.num_logprobs + extra) for beam in found.beams])
    return found.best(), found.num_steps_done


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_result_is_vllms(length_penalty: float, ignore_eos: bool) -> None:
    for seed in range(12):
        model = RandomModel(seed, vocab_size=random.Random(seed).choice([3, 6, 12]))
        width = 1 + seed % 4
        params = BeamSearchParams(width, 6, ignore_eos=ignore_eos, length_penalty=length_penalty)
        beams, _ = run(model, params, extra=seed % 3)
        expected = search(params, PROMPT, model.next_logprobs, EOS)
        assert [Found(beam.token_ids, beam.cumulative_logprob) for beam in beams] == expected


def test_a_search_ends_when_no_beam_can_become_better() -> None:
    steps = [run(RandomModel(seed, 4), BeamSearchParams(2, 40, length_penalty=0.0))[1] for seed in range(5)]
    assert max(steps) < 40


def test_log_probabilities_are_those_of_the_tokens() -> None:
    model, params = RandomModel(3, 8), BeamSearchParams(3, 5)
    for beam in run(model, params)[0]:
        assert len(beam.logprobs) == len(beam.token_ids)
        assert sum(entry.logprob for entry in beam.logprobs) == pytest.approx(beam.cumulative_logprob)
        for position, (token_id, entry) in enumerate(zip(beam.token_ids, beam.logprobs, strict=True)):
            ranked = model.next_logprobs([*PROMPT, *beam.token_ids[:position]])
            assert (entry.token_id, ranked[entry.rank - 1][0]) == (token_id, token_id)
        assert (beam.eos_token_id is not None) == (beam.token_ids[-1] in EOS)


def test_outputs_end_at_the_models_length() -> None:
    found = BeamSearch(BeamSearchParams(2, 40), num_prompt_tokens=3, eos_token_ids=(), max_model_len=8)
    model = RandomModel(1, 6)
    while not found.is_finished:
        found.advance([model.entry([*PROMPT, *beam.token_ids], 4) for beam in found.beams])
    assert [len(beam.token_ids) for beam in found.best()] == [5, 5]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"beam_width": 0}, "beam_width must be an integer of at least 1, got 0"),
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1, got 0"),
        ({"beam_width": "2"}, "beam_width must be an integer of at least 1, got '2'"),
        ({"temperature": -1.0}, "temperature must be at least 0"),
        ({"length_penalty": 11.0}, "length_penalty must be from -10 to 10, got 11"),
        ({"length_penalty": math.nan}, "length_penalty must be from -10 to 10, got nan"),
    ],
)
def test_wrong_parameters_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **values})
