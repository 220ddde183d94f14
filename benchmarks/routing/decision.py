"""Cost of a routing decision, and the index's memory: `python -m benchmarks.routing.decision`.

256 replicas, prompts of 8,192 tokens, an index with a given number of blocks, an adapter that every fourth replica has.
Times are the thread's CPU time in microseconds: `choose`, `record_sent`, both together, and `add_confirmed` when the
engine's KV event arrives.
"""

import argparse
import os
import random
import statistics
import time
import tracemalloc
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from proa.contract import LoadedLoras, Lora
from proa_gateway.engines.engine_loras import EngineLoras
from proa_gateway.routing.index import PrefixIndex
from proa_gateway.routing.policies import POLICIES, HashChain, Policy, RoutingHints, make_policy

CHAIN = HashChain(b"\0" * 16, 16)
NUM_TOKENS = 8192
ROUNDS = 500
LORA = Lora(name="adapter", path="/adapter", digest="d")


@dataclass(slots=True)
class Replica:
    address: str
    load: int
    kv_cache_usage: float
    loras: EngineLoras


def hashes(count: int) -> list[bytes]:
    return [os.urandom(16) for _ in range(count)]


def measure(
    policy: Policy, index: PrefixIndex, replicas: dict[str, Replica], make: Callable[[], RoutingHints], in_flight: int
) -> str:
    """Measure with `in_flight` requests whose blocks the engines have not confirmed yet."""
    times: dict[str, list[float]] = {name: [] for name in ("choice", "record", "both", "confirm")}
    pending: deque[tuple[str, RoutingHints]] = deque()
    for _ in range(ROUNDS + in_flight):
        hints = make()
        before = time.thread_time_ns()
        chosen = policy.choose(replicas, hints)
        between = time.thread_time_ns()
        policy.record_sent(chosen.address, hints)
        after = time.thread_time_ns()
        chosen.load += 1
        pending.append((chosen.address, hints))
        if len(pending) <= in_flight:
            continue
        address, computed = pending.popleft()
        replicas[address].load -= 1
        start = time.thread_time_ns()
        if policy.needs_hashes:
            index.add_confirmed(address, computed.block_hashes)
        confirm = time.thread_time_ns() - start
        for name, value in zip(times, (between - before, after - between, after - before, confirm), strict=True):
            times[name].append(value / 1e3)
    return "  ".join(
        f"{name} us p50 {statistics.median(values):4.0f} p99 {statistics.quantiles(values, n=100)[98]:4.0f}"
        for name, values in times.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=500_000, help="in the index before the measurement")
    parser.add_argument("--in-flight", type=int, default=512, help="requests whose blocks are not confirmed yet")
    arguments = parser.parse_args()
    rng = random.Random(1)
    replicas = [
        Replica(f"10.0.0.{number}:50051", rng.randrange(20), rng.random(), EngineLoras("", lambda lora, model: None))
        for number in range(arguments.replicas)
    ]
    for number, replica in enumerate(replicas):
        replica.loras.start("m", 8, LoadedLoras(loras=(LORA,) if number % 4 == 0 else ()))
    index = PrefixIndex()
    tracemalloc.start()
    for replica in replicas:
        index.add_replica(replica.address, CHAIN, 50_000)
        index.add_confirmed(replica.address, hashes(arguments.blocks // arguments.replicas))
    allocated, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(
        f"index: {index.num_blocks:,} blocks, {allocated / index.num_blocks:.0f} bytes a block allocated, "
        f"{index.num_bytes / index.num_blocks:.0f} estimated"
    )
    system = hashes(128)  # that every replica has
    for replica in replicas:
        index.add_confirmed(replica.address, system)
    by_address, in_flight = {replica.address: replica for replica in replicas}, arguments.in_flight
    documents = [system + hashes(384) for _ in range(200)]
    for number, document in enumerate(documents):
        for replica in rng.sample(replicas, 1 + number % 4):
            index.add_confirmed(replica.address, document[: rng.randrange(256, 513)])
    kinds: dict[str, Callable[[], RoutingHints]] = {
        "nothing cached": lambda: RoutingHints(hashes(512), CHAIN, NUM_TOKENS, "me"),
        "a system prompt everywhere": lambda: RoutingHints(system + hashes(384), CHAIN, NUM_TOKENS, "me"),
        "documents here and there": lambda: RoutingHints(rng.choice(documents), CHAIN, NUM_TOKENS, "me"),
        "documents, with an adapter": lambda: RoutingHints(rng.choice(documents), CHAIN, NUM_TOKENS, "me", LORA),
    }
    for name in POLICIES:
        policy = make_policy(name, index, rng, time.monotonic)
        for kind in kinds if policy.needs_hashes else ("nothing cached", "documents, with an adapter"):
            print(f"{name:12} {kind:27} {measure(policy, index, by_address, kinds[kind], in_flight)}", flush=True)


if __name__ == "__main__":
    main()
