"""The sampler against a naive one for one row, and that a row's result does not depend on its batch."""

import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from proa.contract import SamplingParams
from proa_engine.kernels.sampling.sampling_reference import gumbel
from proa_engine.step import logprobs
from support.runner import EOS, VOCAB_SIZE, FakeModel, RunnerHarness

MODEL = FakeModel()
PROMPT = [7, 11, 11, 13, 7]
OUTPUT = [21, 22, 21, 23]

FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7, "key": 2**63 + 5},
    "hot": {"temperature": 1.9, "key": 1},
    "top_p": {"top_p": 0.8, "key": 3},
    "top_p of a flat distribution": {"temperature": 50.0, "top_p": 0.95, "key": 3},
    "top_k": {"top_k": 5, "key": 4},
    "top_k of many": {"top_k": 200, "temperature": 3.0, "key": 4},
    "top_k and top_p": {"top_k": 7, "top_p": 0.6, "key": 5},
    "min_p": {"min_p": 0.2, "key": 6},
    "min_p and top_p": {"min_p": 0.01, "top_p": 0.9, "top_k": 30, "key": 6},
    "presence": {"presence_penalty": 1.5, "key": 7},
    "frequency": {"frequency_penalty": -1.2, "temperature": 0.0},
    "repetition": {"repetition_penalty": 1.7, "key": 8},
    "penalties": {"presence_penalty": 2, "frequency_penalty": 1, "repetition_penalty": 0.6, "temperature": 0.0},
    "logit_bias": {"logit_bias": {5: 20.0, 6: 19.5, 9: -100.0}, "key": 9},
    "allowed": {"allowed_token_ids": (3, 4, 5, 250), "key": 10},
    "bad word": {"bad_words_token_ids": ((23,), (5,)), "temperature": 0.0},
    "bad phrase": {"bad_words_token_ids": ((21, 23, 17), (23, 18), (22, 19), (1,) * 12), "temperature": 0.0},
    "min_tokens": {"min_tokens": 8, "stop_token_ids": (40, 41), "logit_bias": {EOS: 90.0, 40: 91.0}, "key": 11},
    "min_tokens reached": {"min_tokens": 4, "logit_bias": {EOS: 90.0}, "temperature": 0.0},
}


def naive_logits(raw: Tensor, prompt: list[int], output: list[int], params: SamplingParams) -> list[float]:
    """Processed logits, before temperature."""
    logits = [float(value) for value in raw]
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    for token in set(prompt + output):
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token, count in Counter(output).items():
        logits[token] -= count * params.frequency_penalty + params.presence_penalty
    forbidden = set()
    if params.allowed_token_ids:
        forbidden |= set(range(VOCAB_SIZE)) - set(params.allowed_token_ids)
    for *head, last in params.bad_words_token_ids:
        tokens = prompt + output
        if tokens[len(tokens) - len(head) :] == head and len(head) <= len(tokens):
            forbidden.add(last)
    if len(output) < params.min_tokens:
        forbidden |= {EOS, *params.stop_token_ids}
    return [-math.inf if token in forbidden else value for token, value in enumerate(logits)]


def naive_kept(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """The tokens that may be drawn, with their scaled logits."""
    scaled = {token: value / params.temperature for token, value in enumerate(logits) if value > -math.inf}
    floor = math.exp(max(scaled.values())) * params.min_p
    scaled = {token: value for token, value in scaled.items() if math.exp(value) >= floor}
    ordered = sorted(scaled.items(), key=lambda item: -item[1])[: params.top_k or None]
    total = sum(math.exp(value) for _, value in ordered)
    kept, mass = {}, 0.0
    for token, value in ordered:
        kept[token] = value
        mass += math.exp(value) / total
        if mass >= params.top_p:
            break
    return kept


def naive_sample(raw: Tensor, prompt: list[int], output: list[int], params: SamplingParams) -> int:
    logits = naive_logits(raw, prompt, output, params)
    if params.temperature == 0:
        return logits.index(max(logits))
    key = params.key or 0
    words = torch.tensor([key & 0xFFFFFFFF, key >> 32, len(prompt) + len(output)]).int()
    noise = gumbel(words[0:1], words[1:2], words[2:3], torch.arange(VOCAB_SIZE, dtype=torch.int32))[0]
    return max(naive_kept(logits, params).items(), key=lambda item: item[1] + float(noise[item[0]]))[0]


@pytest.mark.parametrize("name", FEATURES)
def test_feature_equals_the_naive_sampler(name: str) -> None:
    harness = RunnerHarness(MODEL)
    rows = random.Random(name)
    for trial in range(40):
        params = SamplingParams(**{"key": 0} | FEATURES[name])
        params = replace(params, key=(params.key or 0) + trial * 2**30)
        output = [*OUTPUT, *rows.choices(range(VOCAB_SIZE), k=trial % 3)]
        result = harness.step({"a": (PROMPT + output, len(PROMPT), params)}, finished=["a"] if trial else [])
        expected = naive_sample(MODEL.logits_after(PROMPT + output), PROMPT, output, params)
        assert result.sampled_token_ids == [[expected]]


def test_rows_with_different_features_in_one_batch_equal_each_alone() -> None:
    together = RunnerHarness(MODEL)
    requests = {name: (PROMPT + OUTPUT, len(PROMPT), SamplingParams(**FEATURES[name])) for name in FEATURES}
    tokens = {name: together.step({name: request}).sampled_token_ids[0] for name, request in requests.items()}
    for step in range(12):
        computed = len(PROMPT) + len(OUTPUT) + step
        result = together.step(known=dict.fromkeys(requests, computed))
        for name, new in zip(result.request_ids, result.sampled_token_ids, strict=True):
            tokens[name] += new
    for name, (prompt, num_prompt, params) in requests.items():
        alone = RunnerHarness(MODEL)
        expected = alone.step({"x": (prompt, num_prompt, params)}).sampled_token_ids[0]
        for step in range(12):
            expected += alone.step(known={"x": len(prompt) + step}).sampled_token_ids[0]
        assert tokens[name] == expected, name


def test_a_resumed_request_samples_the_same_tokens() -> None:
    params = SamplingParams(temperature=1.3, key=77, frequency_penalty=0.5, top_p=0.9, min_tokens=9)
    whole = RunnerHarness(MODEL).generate(PROMPT, params, 12)
    for cut in (1, 5, 11):
        resumed = RunnerHarness(MODEL)
        tokens = PROMPT + whole[:cut]
        assert resumed.step({"r": (tokens, len(PROMPT), params)}).sampled_token_ids == [[whole[cut]]]


def test_sampled_tokens_have_the_distribution_of_the_logits() -> None:
    harness = RunnerHarness(MODEL, max_num_seqs=500)
    params = SamplingParams(temperature=1.5)
    counts: Counter[int] = Counter()
    for chunk in range(10):
        names = {f"{chunk}-{row}": replace(params, key=chunk * 1000 + row) for row in range(500)}
        result = harness.step({name: (PROMPT, len(PROMPT), of) for name, of in names.items()})
        counts.update(token for [token] in result.sampled_token_ids)
        harness.step(finished=list(names))
    expected = (MODEL.logits_after(PROMPT) / 1.5).softmax(-1) * 5000
    likely = [token for token in range(VOCAB_SIZE) if expected[token] >= 5]
    rest = 5000 - sum(counts[token] for token in likely)
    rest_expected = 5000 - float(expected[likely].sum())
    chi_square = sum((counts[token] - float(expected[token])) ** 2 / float(expected[token]) for token in likely)
    chi_square += (rest - rest_expected) ** 2 / rest_expected
    freedom = len(likely)
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_greedy_ties_are_broken_by_the_lowest_id() -> None:
    model = FakeModel()
    model.by_token[:], model.by_position[:] = 0.0, 0.0
    model.by_token[:, [40, 30, 50]] = 1.0
    assert RunnerHarness(model).generate(PROMPT, SamplingParams(temperature=0), 2) == [30, 30]


def test_logprobs_are_of_the_models_distribution_before_any_operation() -> None:
    params = SamplingParams(temperature=0.5, logprobs=3, logit_bias={9: 50.0}, repetition_penalty=1.5, key=1)
    result = RunnerHarness(MODEL).step(
        {
            "biased": (PROMPT, len(PROMPT), params),
            "silent": (PROMPT, len(PROMPT), replace(params, logprobs=None)),
            "bare": (PROMPT, len(PROMPT), replace(params, logprobs=0)),
        }
    )
    assert list(result.logprobs) == ["biased", "bare"]
    [logprobs] = result.logprobs["biased"]
    own = MODEL.logits_after(PROMPT).log_softmax(-1)
    top = own.topk(3)
    assert logprobs.token_id == 9
    assert logprobs.logprob == pytest.approx(float(own[9]), abs=1e-5)
    assert logprobs.rank == int((own > own[9]).sum()) + 1
    assert list(logprobs.top_token_ids) == top.indices.tolist()
    assert list(logprobs.top_logprobs) == pytest.approx(top.values.tolist(), abs=1e-5)
    assert list(result.logprobs["bare"][0].top_token_ids) == []


def test_named_tokens_are_in_place_of_the_likeliest() -> None:
    params = SamplingParams(temperature=0.5, logprobs=2, key=1)
    harness = RunnerHarness(MODEL)
    requests = {
        "two": (PROMPT, len(PROMPT), replace(params, logprob_token_ids=(9, 3))),
        "top": (PROMPT, len(PROMPT), params),
        "silent": (PROMPT, len(PROMPT), replace(params, logprobs=None)),
        "one": (PROMPT, len(PROMPT), replace(params, logprobs=0, logprob_token_ids=(5,))),
    }
    own = MODEL.logits_after(PROMPT).log_softmax(-1)
    result = harness.step(requests)
    assert [list(result.logprobs[name][0].top_token_ids) for name in ("two", "top", "one")] == [
        [9, 3],
        own.topk(2).indices.tolist(),
        [5],
    ]
    assert result.logprobs["two"][0].logprob == pytest.approx(float(own[result.logprobs["two"][0].token_id]), abs=1e-5)
    assert list(result.logprobs["two"][0].top_logprobs) == pytest.approx(own[[9, 3]].tolist(), abs=1e-5)
    assert list(result.logprobs["one"][0].top_logprobs) == pytest.approx([float(own[5])], abs=1e-5)


def test_named_tokens_are_the_same_in_each_step() -> None:
    params = SamplingParams(temperature=0, logprob_token_ids=(9, 3))
    harness = RunnerHarness(MODEL)
    tokens = list(PROMPT)
    result = harness.step({"x": (PROMPT, len(PROMPT), params)})
    for _ in range(4):
        own = MODEL.logits_after(tokens).log_softmax(-1)
        [entry] = result.logprobs["x"]
        assert list(entry.top_token_ids) == [9, 3]
        assert list(entry.top_logprobs) == pytest.approx(own[[9, 3]].tolist(), abs=1e-5)
        result = harness.step(known={"x": len(tokens)})
        tokens.append(entry.token_id)


def test_prompt_logprobs_are_computed_in_chunks_and_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logprobs, "_PROMPT_LOGITS_BYTES", 9 * 4 * VOCAB_SIZE)
    harness = RunnerHarness(FakeModel())
    prompt = random.Random(1).choices(range(VOCAB_SIZE), k=23)
    params = SamplingParams(temperature=0, prompt_logprobs=2)
    parts = harness.step({"p": (prompt, 23, params)}, scheduled={"p": 10}).prompt_logprobs["p"]
    parts = [*parts, *harness.step(known={"p": 10}, scheduled={"p": 13}).prompt_logprobs["p"]]
    assert harness.model.logit_rows == [9, 1, 1, 9, 3]  # 10 positions; then the sampled one, and 12 positions
    assert [part.token_id for part in parts] == prompt[1:]
    for index, part in enumerate(parts):
        own = MODEL.logits_after(prompt[: index + 1]).log_softmax(-1)
        assert part.logprob == pytest.approx(float(own[part.token_id]), abs=1e-5)
        assert part.rank == int((own > own[part.token_id]).sum()) + 1
        assert list(part.top_token_ids) == own.topk(2).indices.tolist()
    assert harness.step(known={"p": 23}).prompt_logprobs == {}
