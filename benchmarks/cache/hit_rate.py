"""Share of prompts that is found in the prefix cache, by kind of cache: `python -m benchmarks.cache.hit_rate`.

Prompts have 300 tokens in common and 50 to 400 of their own. They come one after the other, or all at once; of these
300 tokens the share is counted. In the last column 300 conversations have turns in random order, each of which appends
60 to 300 tokens; of what a turn repeats the share is counted. The core is the real one; the device computes nothing.

The sizes are those of a GPU with 40 GiB for the cache (Qwen3.5: an H200), where 257 slots of recurrent states are for
256 requests and the others for snapshots: "qwen3.5" is Qwen3.5-35B-A3B, "nemotron" Nemotron-3-Nano with half of what
is left for snapshots and "nemotron, 1/4" with a quarter, "lfm2" LFM2-8B-A1B and "lfm2, 512" with the interval of 512
tokens that larger states have.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
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
NUM_CONVERSATIONS, NUM_TURNS = 300, 1200


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    windows: tuple[int, ...] = ()
    num_state_slots: int = 0
    interval: int = 16_384
    num_blocks: int = 100_000


KINDS: Final[dict[str, Kind]] = {
    "full": Kind(),
    "window": Kind(windows=(128,)),
    "qwen3.5": Kind(num_state_slots=257 + 171),
    "nemotron": Kind(num_state_slots=257 + 308, interval=32_768, num_blocks=154_000),
    "nemotron, 1/4": Kind(num_state_slots=257 + 154, interval=32_768, num_blocks=231_000),
    "lfm2": Kind(num_state_slots=257 + 72_000, interval=64),
    "lfm2, 512": Kind(num_state_slots=257 + 72_000, interval=512),
}


def make_core(kind: Kind) -> EngineCore:
    groups = CacheGroups(
        num_blocks=kind.num_blocks,
        block_size=BLOCK_SIZE,
        windows=kind.windows,
        num_state_slots=kind.num_state_slots,
        checkpoint_interval=kind.interval,
        min_junction=min(256, kind.interval // 2),
        max_step_tokens=8192,
    )
    manager = KVCacheManager(groups, hash_block=hash_block, checkpoint_positions=checkpoint_positions)
    return EngineCore(Scheduler(SchedulerConfig(max_model_len=8192, max_num_seqs=256), manager), InstantExecutor())


def submit(core: EngineCore, request_id: str, prompt: list[int], rng: random.Random) -> None:
    params = SamplingParams(max_tokens=rng.randint(5, 60), ignore_eos=True)
    core.submit(
        EngineCoreRequest(request_id=request_id, prompt_token_ids=prompt, sampling_params=params, arrival_time=0.0)
    )


def finish(core: EngineCore) -> dict[str, int]:
    """Run until no request is left. Returns each one's cached tokens."""
    num_cached = dict[str, int]()
    while core.has_unfinished_requests():
        outputs = core.step()
        for output in () if outputs is None else outputs.outputs:
            num_cached[output.request_id] = output.num_cached_tokens or 0
    return num_cached


def random_tokens(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(100_000) for _ in range(num_tokens)]


def hit_rate(kind: Kind, num_requests: int, *, at_once: bool, seed: int = 0) -> float:
    """Cached tokens of all requests, at most those in common, as a share of these."""
    rng, core, num_cached = random.Random(seed), make_core(kind), dict[str, int]()
    shared = random_tokens(rng, NUM_SHARED)
    for index in range(num_requests):
        submit(core, str(index), shared + random_tokens(rng, rng.randint(50, 400)), rng)
        if not at_once or index == num_requests - 1:
            num_cached |= finish(core)
    return sum(min(cached, NUM_SHARED) for cached in num_cached.values()) / (NUM_SHARED * num_requests)


def hit_rate_of_turns(kind: Kind, seed: int = 0) -> float:
    """Cached tokens of all turns but the first ones, as a share of what they repeat."""
    rng, core, num_cached, num_repeated = random.Random(seed), make_core(kind), 0, 0
    conversations: list[list[int]] = [[] for _ in range(NUM_CONVERSATIONS)]
    for turn in range(NUM_TURNS):
        conversation = rng.choice(conversations)
        num_repeated += len(conversation)
        conversation += random_tokens(rng, rng.randint(60, 300))
        submit(core, str(turn), list(conversation), rng)
        num_cached += finish(core)[str(turn)]
    return num_cached / num_repeated


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)
    print(f"{'cache':>13} {'100, one by one':>16} {'256 at once':>12} {'1000 at once':>13} {'turns':>8}")
    for name, kind in KINDS.items():
        rates = [hit_rate(kind, count, at_once=at_once) for count, at_once in ((100, False), (256, True), (1000, True))]
        turns = hit_rate_of_turns(kind)
        print(f"{name:>13} {rates[0]:>16.1%} {rates[1]:>12.1%} {rates[2]:>13.1%} {turns:>8.1%}", flush=True)


if __name__ == "__main__":
    main()
