"""Masks of grammars: masked rows sample allowed tokens only, and other rows are not affected."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from proa.contract import SamplingParams
from proa_engine.core.grammar import GrammarMasks
from proa_engine.json_configs import SpeculativeConfig
from proa_engine.layers.parallel import ParallelContext
from support.masks import masks_of
from support.runner import VOCAB_SIZE, FakeModel, RunnerHarness, StepResult

ALLOWED = [3, 31, 32, 64, 290]
GREEDY = SamplingParams(temperature=0)
PARAMS = {
    "greedy": GREEDY,
    "hot": SamplingParams(temperature=1.9, key=1),
    "top_k": SamplingParams(top_k=5, key=2),
    "top_p": SamplingParams(top_p=0.3, key=3),
    "min_p": SamplingParams(min_p=0.9, key=4),
    "penalties": SamplingParams(repetition_penalty=1.7, frequency_penalty=1.0, key=5),
    "bias": SamplingParams(logit_bias={100: 100.0}, key=6),
    "bad word": SamplingParams(bad_words_token_ids=((3,), (64,)), temperature=0),
    "logprobs": SamplingParams(logprobs=3, key=7),
}
DRAFTS = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_max=4)
MODEL = FakeModel()


def masks(*rows: int, allowed: Sequence[int] = ALLOWED) -> GrammarMasks:
    return masks_of(dict.fromkeys(rows, allowed), VOCAB_SIZE)


def by_id(result: StepResult) -> dict[str, list[int]]:
    return dict(zip(result.request_ids, result.sampled_token_ids, strict=True))


def prompts(params: Mapping[str, SamplingParams], prefix: str = "") -> dict[str, Any]:
    return {prefix + name: ([7, 11, 13, index], 4, each) for index, (name, each) in enumerate(params.items())}


@pytest.mark.parametrize("graphs", [False, True])
def test_masked_rows_sample_allowed_tokens_and_plain_rows_what_they_do_without_masks(graphs: bool) -> None:
    plain, mixed = RunnerHarness(MODEL, graphs=graphs), RunnerHarness(MODEL, graphs=graphs)
    expected = [by_id(plain.step(prompts(PARAMS)))]
    expected += [by_id(plain.step(known=dict.fromkeys(PARAMS, 4 + step))) for step in range(3)]
    # Constrained requests among the others in the batch.
    new = prompts(PARAMS, "masked ") | prompts(PARAMS)
    new = dict(sorted(new.items(), key=lambda item: item[1][0]))
    names = list(new)
    masked = masks(*(row for row, name in enumerate(names) if name.startswith("masked")))
    results = [by_id(mixed.step(new, masks=masked))]
    results += [by_id(mixed.step(known=dict.fromkeys(names, 4 + step), masks=masked)) for step in range(3)]
    assert mixed.capture.num_replays == 3 * graphs
    for result, of_plain in zip(results, expected, strict=True):
        assert {name: result[name] for name in PARAMS} == of_plain
        assert {result[name][0] for name in names if name.startswith("masked")} <= set(ALLOWED)
        assert result["masked bad word"][0] not in (3, 64)


def test_a_masked_row_samples_the_likeliest_of_its_allowed_tokens() -> None:
    result = RunnerHarness(MODEL).step({"a": ([5, 6, 7], 3, GREEDY)}, masks=masks(0))
    best = MODEL.logits_after([5, 6, 7])[ALLOWED].argmax()
    assert result.sampled_token_ids == [[ALLOWED[int(best)]]]


def test_rows_behind_drafts_and_chunks_get_their_own_masks() -> None:
    model = FakeModel()
    model.by_position.zero_()
    harness = RunnerHarness(model, drafts=DRAFTS)
    loop = [10, 11, 12, 13, 14] * 2
    for before, following in zip(loop, loop[1:] + loop[:1], strict=True):
        model.by_token[before, following] = 99.0
    harness.step({"drafted": (loop, 10, GREEDY), "masked decode": (loop[1:], 9, GREEDY)})
    plan = harness.schedule(
        {"chunk": ([10] * 9, 9, GREEDY), "masked prompt": ([12, 13], 2, GREEDY), "prompt": ([12, 13], 2, GREEDY)},
        {"drafted": 10, "masked decode": 9},
        scheduled={"drafted": 4, "chunk": 4},
    )
    plan.num_chunk_tokens = {"chunk": 4, "drafted": 4, "masked prompt": 2, "prompt": 2}
    plan.grammar_rows = [0, 3]
    result = harness.run(harness.runner.prepare_inputs(plan), masks_of({0: [200], 3: [201]}, VOCAB_SIZE))
    assert by_id(result) == {
        "masked decode": [200],
        "chunk": [],
        "drafted": [11, 12, 13, 14],
        "masked prompt": [201],
        "prompt": [14],
    }


def test_samples_behind_drafts_get_masks_of_their_own() -> None:
    model = FakeModel()
    model.by_position.zero_()
    harness = RunnerHarness(model, drafts=DRAFTS)
    loop = [10, 11, 12, 13, 14] * 2
    for before, following in zip(loop, loop[1:] + loop[:1], strict=True):
        model.by_token[before, following] = 99.0
    harness.step({"a": (loop, 10, GREEDY), "b": (loop, 10, GREEDY)})
    plan = harness.schedule({}, {"a": 10, "b": 10}, scheduled={"a": 4, "b": 4})
    plan.grammar_rows = [1]
    inputs = harness.runner.prepare_inputs(plan)
    words = masks_of({0: [11], 1: [12], 2: [200]}, VOCAB_SIZE)
    result = harness.run(inputs, GrammarMasks([1, 1, 1], [0, 1, 2], words.bits))
    assert by_id(result) == {"a": [11, 12, 13, 14], "b": [11, 12, 200]}
    assert inputs is not None
    ((copied,),) = (part.draft_copies for part in inputs.parts)
    assert copied.by_row() == {1: [11, 12, 13]}


def test_log_probabilities_are_those_of_the_model_without_the_mask() -> None:
    wanted = SamplingParams(temperature=0, logprobs=2)
    harness = RunnerHarness(MODEL)
    result = harness.step({"a": ([5, 6, 7], 3, wanted)}, masks=masks(0, allowed=[3]))
    [sampled] = result.logprobs["a"]
    logprobs = MODEL.logits_after([5, 6, 7]).log_softmax(-1)
    assert sampled.token_id == 3
    assert sampled.logprob == pytest.approx(float(logprobs[3]), abs=1e-5)
    assert list(sampled.top_token_ids[:2]) == logprobs.topk(2).indices.tolist()
    assert sampled.rank == int((logprobs > logprobs[3]).sum()) + 1


@pytest.mark.parametrize("name", PARAMS)
def test_a_row_that_may_sample_nothing_samples_token_0(name: str) -> None:
    result = RunnerHarness(MODEL).step({"a": ([5, 6, 7], 3, PARAMS[name])}, masks=masks(0, allowed=[]))
    assert result.sampled_token_ids == [[0]]


def test_a_constrained_step_without_a_mask_samples_freely() -> None:
    expected = RunnerHarness(MODEL).step(prompts(PARAMS)).sampled_token_ids
    harness = RunnerHarness(MODEL)
    plan = harness.schedule(prompts(PARAMS))
    plan.grammar_rows = [0, 4]
    assert harness.run(harness.runner.prepare_inputs(plan)).sampled_token_ids == expected


class FakeParallel(ParallelContext):
    """One of two ranks whose broadcasts go through `sent`; rank 0 must run first."""

    def __init__(self, rank: int, sent: list[torch.Tensor]) -> None:
        super().__init__(rank, 2)
        object.__setattr__(self, "sent", sent)

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        sent: list[torch.Tensor] = self.__dict__["sent"]
        if self.rank:
            return x.copy_(sent.pop(0))
        sent.append(x.clone())
        return x


def test_rank_0_samples_constrained_steps_for_all_ranks() -> None:
    sent: list[torch.Tensor] = []
    alone, first, second = (
        RunnerHarness(MODEL),
        *(RunnerHarness(MODEL, parallel=FakeParallel(r, sent)) for r in (0, 1)),
    )
    allowed = masks(1, 2)
    new, known = prompts(PARAMS), dict.fromkeys(PARAMS, 4)
    for harness in (alone, first):
        harness.step(new, masks=allowed)
    plan = second.schedule(new)
    plan.grammar_rows = [1, 2]
    inputs = second.runner.prepare_inputs(plan)
    assert inputs is not None
    second.runner.execute_model(inputs)
    second.runner.sample_tokens()
    assert not sent
    results = [harness.step(known=known).sampled_token_ids for harness in (alone, first, second)]
    assert results[0] == results[1] == results[2]
    assert not sent, "a plain step is sampled by every rank"
