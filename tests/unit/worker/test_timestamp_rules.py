"""Rules for timestamps against `WhisperTimeStampLogitsProcessor`, and tokens that are suppressed as the first one."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from proa.contract import Grammar, SamplingParams, StructuredOutputsParams, TimestampRules
from proa_engine.json_configs import SpeculativeConfig
from proa_engine.kernels.sampling.timestamps import apply_timestamps
from support.runner import FakeModel, RunnerHarness

VOCAB: Final = 60
END, NO_TIMESTAMPS, BEGIN = 35, 39, 40
RULES = TimestampRules(begin_id=BEGIN, no_timestamps_id=NO_TIMESTAMPS, end_id=END, max_initial_index=5)
PROMPT = [36, 45, 37]  # with what is no timestamp, because it is not of the output
MODEL = FakeModel()  # of 300 tokens
OF_MODEL = TimestampRules(begin_id=200, no_timestamps_id=199, end_id=150, max_initial_index=30)


def by_transformers(prompt: list[int], output: list[int], logits: Tensor, rules: TimestampRules) -> Tensor:
    config: Any = SimpleNamespace(
        no_timestamps_token_id=rules.no_timestamps_id,
        eos_token_id=rules.end_id,
        bos_token_id=rules.end_id,
        max_initial_timestamp_index=rules.max_initial_index,
    )
    assert rules.begin_id == rules.no_timestamps_id + 1
    process = WhisperTimeStampLogitsProcessor(config, begin_index=len(prompt))
    scores: Tensor = process(torch.tensor([[*prompt, *output]]), logits[None])
    return scores[0]


def random_output(rng: random.Random) -> list[int]:
    """Of text and timestamps, which may go back."""
    times = sorted(rng.choices(range(BEGIN, VOCAB), k=4))
    choices = [rng.randrange(END), *times[:2], END, rng.randrange(BEGIN, VOCAB)]
    return [rng.choice(choices) for _ in range(rng.choice([0, 0, 1, 2, 3, rng.randint(4, 12)]))]


@pytest.mark.parametrize("max_initial", [None, 5])
def test_forbidden_tokens_are_those_of_transformers(max_initial: int | None) -> None:
    rng, rules = random.Random(1), replace(RULES, max_initial_index=max_initial)
    outputs = [random_output(rng) for _ in range(300)]
    logits = torch.randn(len(outputs), VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    logits[::5, BEGIN:] += 2  # so that timestamps are often more likely than text
    width = len(PROMPT) + max(map(len, outputs)) + 2
    tokens = torch.full((len(outputs), width), BEGIN, dtype=torch.int32)  # behind a request's end lies another's
    for row, output in enumerate(outputs):
        tokens[row, : len(PROMPT) + len(output)] = torch.tensor(PROMPT + output)
    most = 2**31 - 1 if max_initial is None else BEGIN + max_initial
    values = torch.tensor([BEGIN, NO_TIMESTAMPS, END, most])[:, None].expand(-1, len(outputs))
    lengths = torch.tensor([len(PROMPT) + len(output) for output in outputs])
    ours = logits.clone()
    apply_timestamps(ours, tokens, torch.full_like(lengths, len(PROMPT)), lengths, values)
    for row, output in enumerate(outputs):
        assert torch.equal(ours[row], by_transformers(PROMPT, output, logits[row], rules)), output


def expected_output(num_tokens: int) -> list[int]:
    """Greedy tokens of the fake model under `OF_MODEL` by `transformers`."""
    output: list[int] = []
    for _ in range(num_tokens):
        logits = MODEL.logits_after(PROMPT + output).float()
        output.append(int(by_transformers(PROMPT, output, logits, OF_MODEL).argmax()))
    return output


@pytest.mark.parametrize("drafts", [None, SpeculativeConfig(method="ngram", num_speculative_tokens=3)])
def test_rows_with_and_without_rules_are_sampled_together(drafts: SpeculativeConfig | None) -> None:
    harness, plain = RunnerHarness(MODEL, drafts=drafts), SamplingParams(temperature=0)
    ruled = SamplingParams(temperature=0, timestamps=OF_MODEL)
    expected = expected_output(20)
    assert len([token for token in expected if token >= OF_MODEL.begin_id]) > 2
    for length in range(20):
        tokens = PROMPT + expected[:length]
        requests = {"plain": (tokens, len(PROMPT), plain), "ruled": (tokens, len(PROMPT), ruled)}
        result = harness.step(requests, finished=["plain", "ruled"] if length else [])
        assert result.sampled_token_ids[1] == [expected[length]]
        assert result.sampled_token_ids[0] == [int(MODEL.logits_after(tokens).argmax())]


def test_suppressed_tokens_are_suppressed_as_the_first_one_alone() -> None:
    harness = RunnerHarness(MODEL)
    logits = MODEL.logits_after(PROMPT).float()
    best = logits.argsort(descending=True).tolist()
    params = SamplingParams(temperature=0, begin_suppress_token_ids=tuple(best[:3]))
    assert harness.step({"a": (PROMPT, len(PROMPT), params)}).sampled_token_ids == [[best[3]]]
    resumed = harness.step({"a": (PROMPT, len(PROMPT) - 1, params)}, finished=["a"])
    assert resumed.sampled_token_ids == [[best[0]]]


def test_a_grammar_excludes_timestamps() -> None:
    for other in ({"grammar": Grammar(text='start: "a"')}, {"structured_outputs": StructuredOutputsParams(regex="a")}):
        with pytest.raises(ValueError, match="timestamps exclude structured_outputs and a grammar"):
            SamplingParams(timestamps=RULES, **other)
