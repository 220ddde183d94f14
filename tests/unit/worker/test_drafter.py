"""Drafter: draft tokens follow a request's true end and are accepted where they equal the target model's sample."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from proa.contract import SamplingParams
from proa_engine.core.types import Drafts
from proa_engine.json_configs import SpeculativeConfig
from support.ngrams import drafts_of
from support.runner import BLOCK_SIZE, FakeModel, RunnerHarness

GREEDY = SamplingParams(temperature=0)
CONFIG = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_max=4)


def counting_model(period: int) -> FakeModel:
    """A model that cycles through the tokens 10 … 10 + period - 1."""
    model = FakeModel()
    model.by_position.zero_()
    model.by_token.zero_()
    for token in range(10, 10 + period):
        model.by_token[token, 10 + (token - 9) % period] = 9.0
    return model


def num_equal(drafts: list[int], tokens: list[int]) -> int:
    """The number of draft tokens before the first that differs from the tokens."""
    return next((index for index, draft in enumerate(drafts) if draft != tokens[index]), len(drafts))


def test_equal_draft_tokens_are_accepted_and_one_more_token_is_sampled() -> None:
    harness = RunnerHarness(counting_model(5), drafts=CONFIG)
    harness.step({"a": ([10, 11, 12, 13, 14, 10, 11], 7, GREEDY)})
    output = harness.step(known={"a": 7}, scheduled={"a": 4})
    assert output.sampled_token_ids == [[13, 14, 10, 11]]
    assert output.drafts == {"a": Drafts(planned=3, proposed=3)}


def test_draft_tokens_are_rejected_from_the_first_difference() -> None:
    harness = RunnerHarness(counting_model(5), drafts=CONFIG)
    harness.step({"a": ([10, 11, 12, 13, 99, 10, 11], 7, GREEDY)})  # the model samples 13, then 14 instead of 99
    assert harness.step(known={"a": 7}, scheduled={"a": 4}).sampled_token_ids == [[13, 14]]
    # The host's upper bound is three tokens more than the request has.
    assert harness.step(known={"a": 11}, scheduled={"a": 2}).sampled_token_ids[0][0] == 10


def test_without_a_matching_ngram_one_token_is_sampled() -> None:
    harness = RunnerHarness(counting_model(50), drafts=CONFIG)
    harness.step({"a": ([10, 11, 12], 3, GREEDY)})
    output = harness.step(known={"a": 3}, scheduled={"a": 4})
    assert output.sampled_token_ids == [[14]]
    assert output.drafts == {"a": Drafts(planned=3, proposed=0)}


def test_rows_of_all_kinds_in_one_step() -> None:
    harness = RunnerHarness(counting_model(5), drafts=CONFIG)
    loop = [10, 11, 12, 13, 14] * 2
    wanted = SamplingParams(temperature=0, logprobs=1)
    named = replace(wanted, logprob_token_ids=(4, 13))
    harness.step({"drafted": (loop, 10, named), "one": (loop[1:], 9, wanted)})
    output = harness.step(
        {"prompt": ([12, 13], 2, GREEDY), "chunk": ([10] * 9, 9, GREEDY)},
        {"drafted": 10, "one": 9},
        scheduled={"drafted": 4, "chunk": 4},
    )
    sampled = dict(zip(output.request_ids, output.sampled_token_ids, strict=True))
    assert sampled == {"one": [11], "drafted": [11, 12, 13, 14], "prompt": [14], "chunk": []}
    assert {name: [part.token_id for part in parts] for name, parts in output.logprobs.items()} == {
        "one": [11],
        "drafted": [11, 12, 13, 14],
    }
    assert [list(part.top_token_ids) for part in output.logprobs["drafted"]] == [[4, 13]] * 4
    assert [part.token_id == 13 for part in output.logprobs["drafted"]] == [
        part.top_logprobs[1] == part.logprob for part in output.logprobs["drafted"]
    ]
    assert list(output.logprobs["one"][0].top_token_ids) == [11]


@pytest.mark.parametrize(
    "style",
    [
        {"temperature": 0},
        {"temperature": 1.0, "key": 7, "top_p": 0.9},
        {"temperature": 0.7, "key": 8, "repetition_penalty": 1.2, "frequency_penalty": 0.2},
        {"temperature": 0, "allowed_token_ids": (20, 21), "presence_penalty": 1.0},
        {"temperature": 0.3, "key": 9, "logit_bias": {5: 3.0}, "bad_words_token_ids": ((6,),)},
    ],
)
def test_accepted_draft_tokens_are_right_while_the_host_is_a_step_behind(
    style: dict[str, Any],
) -> None:
    params = SamplingParams(**style)
    model = FakeModel()
    model.by_token[:, 20:24] += 5.0  # so that some n-grams repeat
    model.by_position.mul_(0.2)
    prompt = [20, 21, 22, 20, 21]
    expected = RunnerHarness(model).generate(prompt, params, 60)

    harness = RunnerHarness(model, drafts=CONFIG)
    prepare, tokens, num_accepted = harness.runner.prepare_inputs, list[int](), 0
    waiting = prepare(harness.schedule({"a": (prompt, 5, params)}))
    num_ahead = 1  # most tokens of the step in flight
    while len(tokens) < 50:
        most = len(prompt) + len(tokens) + num_ahead
        following = prepare(harness.schedule(known={"a": most - 1}, scheduled={"a": 4}))
        drafts = drafts_of(prompt + tokens, 3, 1, 4) if tokens else []  # the prefill has none
        num_ahead = 4
        output = harness.run(waiting)
        [sampled] = output.sampled_token_ids
        assert sampled == expected[len(tokens) :][: 1 + num_equal(drafts, expected[len(tokens) :])]
        tokens += sampled
        num_accepted += len(sampled) - 1
        waiting = following
    assert num_accepted > 0


def test_a_reused_slot_starts_with_the_new_requests_length() -> None:
    harness = RunnerHarness(counting_model(5), drafts=CONFIG, max_num_seqs=1)
    prepare = harness.runner.prepare_inputs
    waiting = [
        prepare(harness.schedule({"old": ([10, 11, 12, 13, 14, 10, 11], 7, GREEDY)})),
        prepare(harness.schedule(known={"old": 7}, scheduled={"old": 4})),
        prepare(harness.schedule({"new": ([12, 13, 14, 10, 11, 12], 6, GREEDY)}, finished=["old"])),
        prepare(harness.schedule(known={"new": 6}, scheduled={"new": 3})),
    ]
    *_, first, second = [harness.run(inputs).sampled_token_ids[0] for inputs in waiting]
    assert (first, second) == ([13], [14, 10, 11])


def test_positions_follow_the_true_length_after_rejected_draft_tokens() -> None:
    model = counting_model(5)
    harness = RunnerHarness(model, drafts=CONFIG)
    harness.step({"a": ([10, 11, 12, 13, 99, 10, 11], 7, GREEDY)})
    harness.step(known={"a": 7}, scheduled={"a": 4})
    harness.step(known={"a": 11}, scheduled={"a": 4})
    _, positions, metadata = model.calls[-1]
    # Of the draft tokens 13, 99 and 10 the first was accepted: ten tokens are known, the last is not computed.
    assert positions.tolist() == [9, 10, 11, 12]
    assert metadata.seq_lens.tolist() == [13]
    table = harness.batch.tables.block_tables[0, 0]
    expected = [int(table[place // BLOCK_SIZE]) * BLOCK_SIZE + place % BLOCK_SIZE for place in positions.tolist()]
    assert metadata.tables[0].slot_mapping.tolist() == expected
    assert torch.equal(metadata.tables[0].block_table[0, :4], table[:4])
