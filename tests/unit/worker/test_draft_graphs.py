"""Decodes with draft tokens in replayed graphs: padding of rows, true positions, and the same tokens as without."""

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest

from proa.contract import SamplingParams
from proa_engine.core.types import Drafts
from proa_engine.json_configs import SpeculativeConfig
from proa_engine.step.step_inputs import DecodeRows, StepInputs
from support.runner import BLOCK_SIZE, FakeModel, RunnerHarness
from support.sampling_params import TRUNCATED
from support.thorough import seeds

GREEDY = SamplingParams(temperature=0)
CONFIG = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_max=4)
STYLES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0, "repetition_penalty": 1.2, "presence_penalty": 0.4},
    TRUNCATED | {"temperature": 0.5, "frequency_penalty": 0.3, "logit_bias": {21: 2.0}, "logprobs": 0},
]


def repeating_model() -> FakeModel:
    """A model whose outputs repeat some n-grams and not others."""
    model = FakeModel()
    model.by_token[:, 20:23] += 6.0
    model.by_position.mul_(0.2)
    return model


def counting_model() -> FakeModel:
    """A model that cycles through the tokens 10 … 14."""
    model = FakeModel()
    model.by_position.zero_()
    model.by_token.zero_()
    for token in range(10, 15):
        model.by_token[token, 10 + (token - 9) % 5] = 9.0
    return model


def test_rows_with_fewer_draft_tokens_are_padded_before_their_own_tokens() -> None:
    model = counting_model()
    harness = RunnerHarness(model, drafts=CONFIG, graphs=True)
    loop = [10, 11, 12, 13, 14, 10, 11]
    harness.step({name: (loop, 7, GREEDY) for name in "abc"})
    output = harness.step(known=dict.fromkeys("abc", 7), scheduled={"b": 4, "c": 3})
    assert dict(zip(output.request_ids, output.sampled_token_ids, strict=True)) == {
        "a": [13],
        "b": [13, 14, 10, 11],
        "c": [13, 14, 10],
    }
    assert output.drafts == {"b": Drafts(3, 3), "c": Drafts(2, 2)}
    input_ids, positions, metadata = model.calls[-1]
    assert input_ids.view(4, 4).tolist() == [[0, 0, 0, 12], [12, 13, 14, 10], [0, 12, 13, 14], [0] * 4]
    assert positions.view(4, 4).tolist() == [[0, 0, 0, 7], [7, 8, 9, 10], [0, 7, 8, 9], [0] * 4]
    assert metadata.seq_lens.tolist() == [8, 11, 10, 0]
    assert (metadata.tables[0].slot_mapping.view(4, 4) == -1).sum(1).tolist() == [3, 0, 1, 4]
    assert model.logit_rows[-1] == 8, "no logits of padding"


def test_replayed_positions_follow_the_true_length_after_rejected_draft_tokens() -> None:
    model = counting_model()
    harness = RunnerHarness(model, drafts=CONFIG, graphs=True)
    harness.step({"a": ([10, 11, 12, 13, 99, 10, 11], 7, GREEDY)})
    harness.step(known={"a": 7}, scheduled={"a": 4})  # one of the drafts 13, 99 and 10 is accepted
    harness.step(known={"a": 11}, scheduled={"a": 4})
    harness.step(known={"a": 15})
    assert harness.capture.num_replays == 3
    wide, one = model.calls[-2:]
    assert wide[1].tolist() == [9, 10, 11, 12]
    assert wide[2].seq_lens.tolist() == [13]
    assert one[1].tolist() == [10], "no earlier token equals the last one, so there were no draft tokens"
    table = harness.batch.tables.block_tables[0, 0]
    expected = [int(table[place // BLOCK_SIZE]) * BLOCK_SIZE + place % BLOCK_SIZE for place in range(9, 13)]
    assert wide[2].tables[0].slot_mapping.tolist() == expected


def test_a_step_with_a_prompt_or_with_too_many_rows_is_not_replayed() -> None:
    harness = RunnerHarness(counting_model(), max_num_seqs=700, drafts=CONFIG, graphs=True)
    loop = [10, 11, 12, 13, 14, 10, 11]
    names = [str(number) for number in range(600)]
    harness.step({name: (loop, 7, GREEDY) for name in names})
    output = harness.step({"new": ([12, 13], 2, GREEDY)}, {"0": 7}, scheduled={"0": 4})
    assert output.sampled_token_ids == [[14], [13, 14, 10, 11]]
    output = harness.step(known=dict.fromkeys(names[1:], 7), scheduled=dict.fromkeys(names[1:], 4))
    assert output.sampled_token_ids == [[13, 14, 10, 11]] * 599
    assert harness.capture.num_replays == 0
    harness.step(known=dict.fromkeys(names[1:], 11))
    assert harness.capture.num_replays == 1, "rows of one token are"


@dataclass
class Client:
    """A request as the host sees it."""

    prompt: list[int]
    params: SamplingParams
    expected: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[int] = field(default_factory=list)
    num_computed: int = 0  # of the steps prepared, as if every draft token in flight were accepted


class Driver:
    """Random steps with one in flight: requests join, stop at any time, and plan any number of draft tokens."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.model = repeating_model()
        self.harness = RunnerHarness(self.model, drafts=CONFIG, graphs=True, max_num_seqs=6)
        self.running: dict[str, Client] = {}
        self.leaving: list[str] = []
        self.in_flight: deque[tuple[StepInputs | None, dict[str, Client], dict[str, int]]] = deque()
        self.num_replays = self.num_accepted = self.num_checked = 0

    def client(self, number: int) -> Client:
        prompt = [self.rng.choice([20, 21, 22, 40]) for _ in range(self.rng.randint(1, 9))]
        params = SamplingParams(key=number, **STYLES[number % len(STYLES)])
        return Client(prompt, params, RunnerHarness(self.model, max_num_seqs=1).generate(prompt, params, 50))

    def prepare(self, number: int) -> None:
        known = {name: client.num_computed for name, client in self.running.items() if self.rng.random() < 0.9}
        planned = {name: 1 + self.rng.choice([0, 1, 3, 3]) for name in known}
        new = {}
        if len(self.running) < 6 - len(self.leaving) and self.rng.random() < 0.25:
            self.running[str(number)] = client = self.client(number)
            new[str(number)] = client.prompt, len(client.prompt), client.params
            planned[str(number)] = len(client.prompt)
        step = self.harness.schedule(new, known, scheduled=planned, finished=self.leaving)
        self.leaving = []
        for name, count in planned.items():
            self.running[name].num_computed += count
        self.in_flight.append((self.harness.runner.prepare_inputs(step), dict(self.running), planned))

    def finish(self) -> None:
        inputs, clients, planned = self.in_flight.popleft()
        if inputs is not None:
            self.num_replays += isinstance(inputs.rows, DecodeRows)
        output = self.harness.run(inputs)
        for name, sampled in zip(output.request_ids, output.sampled_token_ids, strict=True):
            client = clients[name]
            if client.tokens:
                client.num_computed -= planned[name] - len(sampled)
                self.num_accepted += len(sampled) - 1
            client.tokens += sampled
            client.logprobs += [part.token_id for part in output.logprobs.get(name, [])]
        for name, client in list(self.running.items()):
            if len(client.tokens) > 40 or self.rng.random() < 0.01:
                del self.running[name]
                self.leaving.append(name)
                self.check(client)

    def check(self, client: Client) -> None:
        self.num_checked += 1
        assert client.tokens[:50] == client.expected[: len(client.tokens)]
        assert client.params.logprobs is None or client.logprobs == client.tokens


@pytest.mark.parametrize("seed", seeds(2, thorough=4))
def test_random_steps_sample_the_same_tokens_as_each_request_alone(seed: int) -> None:
    driver = Driver(random.Random(seed))
    driver.prepare(0)
    for number in range(1, 200):
        driver.prepare(number)
        driver.finish()
    assert driver.num_checked > 10
    assert driver.num_replays > 60
    assert driver.num_accepted > 50
