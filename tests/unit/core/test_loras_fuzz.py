"""Random traffic with adapters, which are loaded, replaced and unloaded at random: each request has its own adapter's
tokens, and no adapter waits for ever."""

import random
from concurrent.futures import Future
from typing import Any, Literal

import pytest

from proa_engine.core.lora_store import LoraError
from proa_engine.core.operations import LoadLora, Operation, ResetPrefixCache, UnloadLora
from support.core import CoreRun
from support.core_traffic import MAX_MODEL_LEN, Traffic, random_host
from support.thorough import seeds

NAMES = "abcde"
DIGESTS = [f"{name}@{version}" for name in NAMES for version in (0, 0, 0, 1)]


class Operator:
    """Loads, replaces and unloads adapters at random, between steps and in the middle of them."""

    def __init__(self, run: CoreRun, rng: random.Random) -> None:
        self.run = run
        self.rng = rng
        self.calls: list[Future[Any]] = []

    def disturb(self) -> None:
        if self.run.executor.lora_reads and self.rng.random() < 0.5:
            self.run.executor.read_lora()
        if self.rng.random() < 0.15:
            name, version = self.rng.choice(NAMES), self.rng.choice(["0"] * 6 + ["1", "missing"])
            load = LoadLora(name, f"{name}@{version}", replace=self.rng.random() < 0.5)
            operations: list[Operation[Any]] = [*[load] * 8, UnloadLora(name), ResetPrefixCache()]
            self.calls.append(self.run.core.operate(self.rng.choice(operations)))

    def unload_all(self) -> None:
        while self.run.executor.lora_reads:
            self.run.executor.read_lora()
            self.run.step()
        for name in NAMES:
            self.calls.append(self.run.core.operate(UnloadLora(name)))
            self.run.step()


@pytest.mark.parametrize("num_speculative_tokens", [0, 3])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("seed", seeds(2, thorough=30))
def test_random_traffic_with_adapters(
    seed: int, async_scheduling: bool, policy: Literal["fcfs", "priority"], num_speculative_tokens: int
) -> None:
    rng = random.Random(seed)
    max_loras = rng.choice([1, 2, 3])
    run = CoreRun(
        num_blocks=rng.choice([16, 40]),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=rng.choice([3, 8, 16]),
        max_num_batched_tokens=rng.choice([16, 64]),
        async_scheduling=async_scheduling,
        policy=policy,
        num_speculative_tokens=num_speculative_tokens,
        accept=(lambda num_drafts: rng.randint(0, num_drafts)) if num_speculative_tokens else None,
        max_loras=max_loras,
        max_cpu_loras=max_loras + rng.randint(1, 4),
        **random_host(rng, seed),
    )
    operator = Operator(run, rng)
    for name in NAMES[: max_loras + 1]:
        run.load_lora(name, f"{name}@0")
    traffic = Traffic(run, rng, 200, abort_share=0.1, grammar_share=0.2, lora_digests=DIGESTS, prefill_share=0.2)
    disturb = traffic.disturb

    def disturb_both() -> None:
        disturb()
        operator.disturb()

    traffic.disturb = run.executor.while_waiting = disturb_both  # type: ignore[method-assign]
    traffic.drive()
    run.executor.while_waiting = None
    operator.unload_all()
    assert not run.executor.loras, "adapters have leaked"
    assert all(call.done() for call in operator.calls)
    assert all(isinstance(call.exception(), LoraError | None) for call in operator.calls)
    rejected = {rejection.request_id: rejection.code for rejection in run.rejections}
    assert run.outputs.keys() | rejected.keys() == traffic.requests.keys()
    for request_id, code in rejected.items():
        refused = traffic.requests[request_id]
        assert refused.lora_name if code == "not_found" else refused.sampling_params.grammar
    for request_id in run.outputs:
        traffic.check(traffic.requests[request_id])
    assert len([name for name in run.outputs if traffic.requests[name].lora_name]) > 20
    assert run.executor.num_slot_fills > 1
