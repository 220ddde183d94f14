"""Random traffic under memory pressure: correct tokens, no leaked block, no starved request."""

import random
from collections.abc import Sequence
from typing import Any, Literal

import pytest

from proa.contract import EngineCoreRequest, EventType, FinishReason, Grammar
from proa_engine.core.kv_events import KvChanges
from proa_engine.core.operations import ResetPrefixCache
from support.core import EOS, CoreRun, make_request
from support.fake_executor import VOCAB_SIZE, generate
from support.fake_grammar import NEVER, fake_grammar, generate_constrained
from support.thorough import seeds

MAX_MODEL_LEN = 60
Policy = Literal["fcfs", "priority"]


def random_prompt(rng: random.Random, prefixes: Sequence[Sequence[int]]) -> list[int]:
    """A prefix, some part of it, or none, and an end of its own or of one of two tokens, so that blocks look alike."""
    prefix = rng.choice(prefixes)
    vocabulary = rng.choice([2, VOCAB_SIZE])
    start = prefix[: rng.choice([rng.randint(0, len(prefix)), len(prefix)])]
    end = [rng.randrange(vocabulary) for _ in range(rng.randint(0 if start else 1, 12))]
    return [*start, *end]


def random_grammar(rng: random.Random) -> Grammar:
    if rng.random() < 0.05:
        return Grammar(text=rng.choice(["invalid", "busy"]))
    start_after = rng.choice([(), (), tuple(rng.sample(range(VOCAB_SIZE), 8))])
    return fake_grammar(
        seed=rng.randrange(4),
        length=rng.choice([0, 1, 2, rng.randint(3, 20), NEVER]),
        fuel=rng.choice([NEVER, NEVER, NEVER, rng.randint(0, 8)]),
        start_after=start_after,
        free_if_first=tuple(rng.sample(range(VOCAB_SIZE), 30)) if start_after and rng.random() < 0.5 else (),
        repeats=bool(start_after) and rng.random() < 0.5,
    )


def random_request(
    rng: random.Random, request_id: str, prompt: list[int], grammar_share: float = 0.0
) -> EngineCoreRequest:
    max_tokens = rng.choice([None, 1, 2, rng.randint(1, 30)])
    params: dict[str, Any] = {
        "max_tokens": max_tokens,
        "min_tokens": min(rng.choice([0, 0, 3]), max_tokens or 3),
        "ignore_eos": rng.random() < 0.3,
        "stop_token_ids": rng.choice([(), (), (7, 8), (0,)]),
        "logprobs": rng.choice([None, None, 0]),
        "prompt_logprobs": rng.choice([None, None, None, 0]),
        "grammar": random_grammar(rng) if rng.random() < grammar_share else None,
    }
    request = make_request(
        request_id, prompt, priority=rng.randint(-2, 2), cache_salt=rng.choice(["", "", "salt"]), **params
    )
    output, reason = expected_output(request)
    # Another engine may have died between the last token and the end, if only this engine knows that it is the end.
    most = len(output) - (reason is not FinishReason.COMPLETE or len(output) == max_tokens)
    if rng.random() < 0.1 and most > 0 and len(prompt) + most < MAX_MODEL_LEN:
        resumed = output[: rng.randint(1, most)]
        return make_request(request_id, prompt, priority=request.priority, resumed=resumed, **params)
    return request


def expected_output(request: EngineCoreRequest) -> tuple[list[int], FinishReason | None]:
    """The output of the request alone, with its end if it has a grammar."""
    params = request.sampling_params
    if params.grammar is None:
        return generate(request.prompt_token_ids, params, EOS, MAX_MODEL_LEN), None
    if params.grammar.text in ("invalid", "busy"):
        return [], None
    return generate_constrained(request, EOS, MAX_MODEL_LEN)


class Follower:
    """A subscriber from a random step on, which reads at random; changes merge in between."""

    def __init__(self, run: CoreRun, rng: random.Random) -> None:
        self.run = run
        self.rng = rng
        self.start = rng.randint(0, 60)
        self.each: set[bytes] | None = None  # by every step's changes
        self.merged: set[bytes] = set()  # by fewer, larger ones
        self.pending = KvChanges()
        self.num_changes = 0

    def step(self) -> None:
        self.start -= 1
        if self.start == 0 or self.rng.random() < 0.02:
            self.run.core.follow_kv_events()
        self.run.step()
        for batch in self.run.kv_events:
            changes = batch.changes
            if self.each is None or (batch.snapshot is not None and self.rng.random() < 0.5):
                assert batch.snapshot is not None, "the first batch has a snapshot"
                changes = KvChanges.snapshot(batch.snapshot)
            self.each = replay(self.each or set(), changes)
            self.pending.merge(changes)
            self.num_changes += len(batch.changes)
        self.run.kv_events.clear()
        if self.each is not None:
            assert self.each == self.run.cached_hashes
        if self.rng.random() < 0.2:
            self.merged = replay(self.merged, self.pending)
            self.pending = KvChanges()
            assert self.merged == (self.each or set())


def replay(held: set[bytes], changes: KvChanges) -> set[bytes]:
    """The cache's content after the changes, none of which is redundant."""
    if changes.is_snapshot:
        assert not changes.removed
        return set(changes.stored)
    assert held >= changes.removed.keys()
    assert not held & changes.stored.keys()
    return held - changes.removed.keys() | changes.stored.keys()


class Traffic:
    """Random arrivals and aborts, between steps and in the middle of them."""

    def __init__(
        self, run: CoreRun, rng: random.Random, num_requests: int, abort_share: float, grammar_share: float = 0.0
    ) -> None:
        self.run = run
        self.rng = rng
        self.abort_share = abort_share
        self.aborted: set[str] = set()
        self.requests: dict[str, EngineCoreRequest] = {}
        prefixes = [
            [rng.randrange(vocabulary) for _ in range(length)] for vocabulary in (2, 61) for length in (5, 16, 28)
        ]
        self.coming = [
            random_request(rng, f"r{i}", random_prompt(rng, prefixes), grammar_share) for i in range(num_requests)
        ]
        grammars = [request.sampling_params.grammar for request in self.coming]
        run.grammars.known = {grammar.text for grammar in grammars if grammar is not None and rng.random() < 0.3}
        run.grammars.known -= {"invalid", "busy"}
        run.executor.while_waiting = self.disturb
        self.step = run.step  # how a step is made

    def disturb(self) -> None:
        while self.coming and self.rng.random() < 0.4:
            request = self.coming.pop()
            self.requests[request.request_id] = request
            self.run.submit(request)
        while self.run.grammars.jobs and self.rng.random() < 0.3:
            self.run.grammars.compile(self.rng.randrange(len(self.run.grammars.jobs)))
        if self.requests and self.rng.random() < self.abort_share:
            request_id = self.rng.choice(list(self.requests))
            self.aborted.add(request_id)
            self.run.core.abort([request_id, "unknown"])

    def drive(self) -> None:
        for _ in range(20_000):
            if not self.coming:
                break
            self.disturb()
            self.step()
        self.run.finish()

    def check(self, request: EngineCoreRequest) -> None:
        request_id = request.request_id
        outputs = self.run.outputs[request_id]
        whole, reason = expected_output(request)
        expected = whole[len(request.resumed_token_ids) :]
        finished = [output.finish_reason for output in outputs if output.finish_reason is not None]
        assert len(finished) == 1
        assert outputs[-1].finish_reason is not None
        tokens = self.run.tokens(request_id)
        if finished[0] is FinishReason.ABORT:
            assert request_id in self.aborted
            assert tokens == expected[: len(tokens)]
            return
        assert tokens == expected
        assert finished[0] is reason or reason is None
        assert bool(outputs[-1].error) is (reason is FinishReason.ERROR)
        assert outputs[-1].num_output_tokens == len(tokens) + len(request.resumed_token_ids)
        if request.sampling_params.logprobs is not None:
            assert [logprob.token_id for output in outputs for logprob in output.logprobs] == tokens
        types = self.run.event_types(request_id)
        if types == [EventType.QUEUED, EventType.FINISHED]:
            assert not expected
            assert reason is FinishReason.COMPLETE
            return
        if request.sampling_params.prompt_logprobs is not None:
            positions = [logprob.rank for output in outputs for logprob in output.prompt_logprobs]
            assert positions == list(range(1, len(request.prompt_token_ids)))
            assert outputs[-1].num_cached_tokens == 0
        self.check_events(types, has_output=bool(tokens))

    @staticmethod
    def check_events(types: list[EventType], *, has_output: bool) -> None:
        assert types[:2] == [EventType.QUEUED, EventType.SCHEDULED]
        assert types[-1] is EventType.FINISHED
        assert types.count(EventType.FIRST_TOKEN) == has_output
        turns = [event for event in types if event in (EventType.PREEMPTED, EventType.RESUMED)]
        assert all(event is (EventType.RESUMED if i % 2 else EventType.PREEMPTED) for i, event in enumerate(turns))


def random_run(
    rng: random.Random, *, async_scheduling: bool, policy: Policy, num_speculative_tokens: int = 0
) -> CoreRun:
    num_blocks = rng.choice([15, 16, 20, 40])  # of 4 tokens: one of the longest requests, up to three
    return CoreRun(
        num_blocks=num_blocks,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=rng.choice([1, 3, 8, 16]),
        max_num_batched_tokens=rng.choice([3, 16, 64]),
        async_scheduling=async_scheduling,
        policy=policy,
        enable_prefix_caching=rng.random() < 0.8,
        block_order=rng.sample(range(num_blocks), num_blocks),
        num_speculative_tokens=num_speculative_tokens,
        accept=(lambda num_drafts: rng.randint(0, num_drafts)) if num_speculative_tokens else None,
    )


@pytest.mark.parametrize("num_speculative_tokens", [0, 1, 5])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("seed", seeds(2, thorough=6))
def test_random_traffic_under_memory_pressure(
    seed: int, async_scheduling: bool, policy: Policy, num_speculative_tokens: int
) -> None:
    rng = random.Random(seed)
    run = random_run(
        rng, async_scheduling=async_scheduling, policy=policy, num_speculative_tokens=num_speculative_tokens
    )
    traffic = Traffic(run, rng, num_requests=150, abort_share=0.1, grammar_share=0.4 if seed % 2 else 0.0)
    traffic.drive()
    rejected = {rejection.request_id: rejection for rejection in run.rejections}
    assert run.outputs.keys() | rejected.keys() == traffic.requests.keys()
    assert not run.outputs.keys() & rejected.keys()
    for request_id, rejection in rejected.items():
        grammar = traffic.requests[request_id].sampling_params.grammar
        assert grammar is not None
        assert rejection.code == {"invalid": "invalid_argument", "busy": "resource_exhausted"}[grammar.text]
    for request_id in run.outputs:
        traffic.check(traffic.requests[request_id])


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("seed", seeds(3, thorough=6))
def test_replayed_kv_events_equal_the_cache_after_every_step(seed: int, async_scheduling: bool) -> None:
    rng = random.Random(seed)
    num_blocks = rng.choice([15, 16, 20, 40])
    run = CoreRun(num_blocks=num_blocks, max_model_len=MAX_MODEL_LEN, async_scheduling=async_scheduling)
    traffic, follower = Traffic(run, rng, num_requests=150, abort_share=0.1), Follower(run, rng)

    def step() -> None:
        if rng.random() < 0.01:
            run.core.operate(ResetPrefixCache())
        follower.step()

    traffic.step = step
    traffic.drive()
    assert follower.num_changes > 20


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_memory_pressure_really_preempts_and_shares(async_scheduling: bool) -> None:
    rng = random.Random(1)
    run = CoreRun(num_blocks=16, max_model_len=MAX_MODEL_LEN, async_scheduling=async_scheduling)
    Traffic(run, rng, num_requests=150, abort_share=0.0).drive()
    stats = run.core.stats()
    assert stats.num_preemptions > 20
    assert stats.prefix_cache_hits > 50


@pytest.mark.parametrize("seed", range(3))
def test_same_tokens_as_an_unpressured_run(seed: int) -> None:
    tokens = []
    for num_blocks in (15, 400):
        rng = random.Random(seed)
        run = CoreRun(num_blocks=num_blocks, max_model_len=MAX_MODEL_LEN)
        traffic = Traffic(run, rng, num_requests=50, abort_share=0.0, grammar_share=0.3)
        traffic.drive()
        tokens.append({request_id: run.tokens(request_id) for request_id in traffic.requests})
        assert (run.core.stats().num_preemptions > 0) is (num_blocks == 15)
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("seed", range(3))
def test_fcfs_starts_no_request_before_an_earlier_one(seed: int) -> None:
    rng = random.Random(seed)
    run = random_run(rng, async_scheduling=True, policy="fcfs")
    traffic = Traffic(run, rng, num_requests=100, abort_share=0.0)
    traffic.drive()
    for resumed in (True, False):  # those that another engine has begun go first
        requests = (name for name, request in traffic.requests.items() if bool(request.resumed_token_ids) is resumed)
        starts = [run.events(name)[1].timestamp for name in requests]
        assert starts == sorted(starts)
