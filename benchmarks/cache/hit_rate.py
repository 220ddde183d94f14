"""Share of a system prompt that is found in the prefix cache, by kind of cache: `python -m benchmarks.cache.hit_rate`.

Prompts have 300 tokens in common and 50 to 400 of their own. They come one after the other, or all at once. The sizes
are Qwen3.5-35B-A3B's on an H200: 257 slots of recurrent states for 256 requests, 171 for snapshots, 1.6 million tokens
in blocks. The core is the real one; the device computes nothing.
"""

import argparse
import random
from collections.abc import Sequence
from typing import Final

from benchmarks.engine.core_step import BLOCK_SIZE, InstantExecutor
from proa.blocks import checkpoint_positions, hash_block
from proa.contract import EngineCoreRequest, SamplingParams
from proa_engine.core.engine_core import EngineCore
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.kv.kv_cache_manager import KVCacheManager
from proa_engine.core.scheduler import Scheduler
from proa_engine.core.scheduler_config import SchedulerConfig

NUM_SHARED = 300
# Windows, state slots.
KINDS: Final[dict[str, tuple[tuple[int, ...], int]]] = {
    "full": ((), 0),
    "window": ((128,), 0),
    "state": ((), 257 + 171),
}


def make_core(kind: str) -> EngineCore:
    windows, num_state_slots = KINDS[kind]
    groups = CacheGroups(
        num_blocks=100_000,
        block_size=BLOCK_SIZE,
        windows=windows,
        num_state_slots=num_state_slots,
        checkpoint_interval=16384,
        min_junction=256,
        max_step_tokens=8192,
    )
    manager = KVCacheManager(groups, hash_block=hash_block, checkpoint_positions=checkpoint_positions)
    return EngineCore(Scheduler(SchedulerConfig(max_model_len=4096, max_num_seqs=256), manager), InstantExecutor())


def hit_rate(kind: str, num_requests: int, *, at_once: bool, seed: int = 0) -> float:
    """Cached tokens of all requests, at most those in common, as a share of these."""
    rng, core, num_cached = random.Random(seed), make_core(kind), dict[str, int]()
    shared = [rng.randrange(100_000) for _ in range(NUM_SHARED)]
    for index in range(num_requests):
        own = [rng.randrange(100_000) for _ in range(rng.randint(50, 400))]
        params = SamplingParams(max_tokens=rng.randint(5, 60), ignore_eos=True)
        request = EngineCoreRequest(
            request_id=str(index), prompt_token_ids=shared + own, sampling_params=params, arrival_time=0.0
        )
        core.submit(request)
        if at_once and index < num_requests - 1:
            continue
        while core.has_unfinished_requests():
            outputs = core.step()
            for output in () if outputs is None else outputs.outputs:
                num_cached[output.request_id] = min(output.num_cached_tokens or 0, NUM_SHARED)
    return sum(num_cached.values()) / (NUM_SHARED * num_requests)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)
    print(f"{'cache':>8} {'100, one by one':>16} {'256 at once':>12} {'1000 at once':>13}")
    for kind in KINDS:
        rates = [hit_rate(kind, count, at_once=at_once) for count, at_once in ((100, False), (256, True), (1000, True))]
        print(f"{kind:>8} {rates[0]:>16.1%} {rates[1]:>12.1%} {rates[2]:>13.1%}", flush=True)


if __name__ == "__main__":
    main()
