"""CPU time of a step of the engine core alone, by kind of cache: `python -m benchmarks.engine.core_step`.

Every request decodes one plain token a step, over an executor that costs nothing. Their lengths differ, so that each
step fills a block of one request in sixteen, and with `--host` stores as many in the host. Milliseconds of this thread;
the garbage collector is off, since a few allocations more or less move its collections from one step to another.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from typing import Final

from proa.blocks import checkpoint_positions, hash_block
from proa.contract import EngineCoreRequest, SamplingParams
from proa_engine.core.engine_core import EngineCore
from proa_engine.core.grammar import GrammarMasks
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.kv.host_tier import HostTierConfig
from proa_engine.core.kv.kv_cache_manager import KVCacheManager
from proa_engine.core.scheduler import Scheduler
from proa_engine.core.scheduler_config import SchedulerConfig
from proa_engine.core.types import ModelRunnerOutput, RowOutput, SchedulerOutput

BLOCK_SIZE = 16
MAX_NUM_SEQS = 256
MAX_MODEL_LEN = 4096
# Windows, checkpoint interval, and whether layers have recurrent states.
KINDS: Final[dict[str, tuple[tuple[int, ...], int, bool]]] = {
    "full": ((), 0, False),
    "gpt-oss": ((128,), 512, False),
    "Gemma 3": ((1024,) * 5, 32768, False),
    "14 tables": ((1024,) * 13, 32768, False),
    "state": ((), 16384, True),
}


class InstantFuture:
    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        return self._output


class InstantExecutor:
    """Samples the same token for every row that ends with its last token."""

    def __init__(self) -> None:
        self._num_left: dict[str, int] = {}  # prompt tokens to compute, by request

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._output = ModelRunnerOutput(plain_token_ids=[7] * len(scheduler_output.decode_request_ids))
        for new in scheduler_output.new_requests:
            self._num_left[new.request_id] = len(new.token_ids) - new.num_computed_tokens
        for request_id, num_tokens in scheduler_output.num_chunk_tokens.items():
            self._num_left[request_id] -= num_tokens
            self._output.others[request_id] = RowOutput([] if self._num_left[request_id] else [7])

    def draft_tokens(self) -> dict[int, list[int]]:
        return {}

    def sample_tokens(self, masks: GrammarMasks | None = None) -> InstantFuture:
        return InstantFuture(self._output)

    def sleep(self, level: int) -> None: ...

    def wake_up(self) -> None: ...

    def shutdown(self) -> None: ...


def cache_groups(kind: str, num_prompt_tokens: int, num_steps: int) -> CacheGroups:
    """Room for all requests."""
    windows, interval, has_states = KINDS[kind]
    columns = (num_prompt_tokens + num_steps) // BLOCK_SIZE + 8
    return CacheGroups(
        num_blocks=MAX_NUM_SEQS * columns * (1 + len(windows)),
        block_size=BLOCK_SIZE,
        windows=windows,
        num_state_slots=2 * MAX_NUM_SEQS if has_states else 0,
        checkpoint_interval=interval,
        min_junction=256,
        max_step_tokens=8192,
    )


def measure(kind: str, num_prompt_tokens: int, num_steps: int, *, has_host: bool) -> list[float]:
    """CPU milliseconds of each step."""
    groups = cache_groups(kind, num_prompt_tokens, num_steps)
    host = HostTierConfig(num_pages=2 * groups.num_blocks, num_states=4 * MAX_NUM_SEQS) if has_host else None
    manager = KVCacheManager(groups, hash_block=hash_block, checkpoint_positions=checkpoint_positions, host=host)
    core = EngineCore(
        Scheduler(SchedulerConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=MAX_NUM_SEQS), manager), InstantExecutor()
    )
    for index in range(MAX_NUM_SEQS):
        params = SamplingParams(max_tokens=num_steps + 200, ignore_eos=True)
        prompt = list(range(index, index + num_prompt_tokens + index % BLOCK_SIZE))
        core.submit(
            EngineCoreRequest(request_id=f"r{index}", prompt_token_ids=prompt, sampling_params=params, arrival_time=0.0)
        )
    while (outputs := core.step()) is None or len(outputs.plain.request_ids) < MAX_NUM_SEQS:
        pass
    gc.collect()
    gc.disable()
    costs = []
    for _ in range(num_steps):
        started = time.thread_time()
        core.step()
        costs.append((time.thread_time() - started) * 1e3)
    gc.enable()
    return costs


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--prompt", type=int, default=1100, help="tokens of the shortest prompt")
    parser.add_argument("--steps", type=int, default=480)
    parser.add_argument("--host", action="store_true", help="with a host tier")
    arguments = parser.parse_args(argv)
    print(f"{'cache':>10} {'mean ms':>8} {'median ms':>10}")
    for kind in arguments.kinds:
        costs = measure(kind, arguments.prompt, arguments.steps, has_host=arguments.host)
        print(f"{kind:>10} {statistics.mean(costs):>8.3f} {statistics.median(costs):>10.3f}", flush=True)


if __name__ == "__main__":
    main()
