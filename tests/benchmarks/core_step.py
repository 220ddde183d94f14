"""What a step costs the host in the engine core alone: `python tests/benchmarks/core_step.py`.

Every request decodes one plain token a step, over an executor that costs nothing; times are this thread's CPU time.
"""

import gc
import statistics
import time

from proa.blocks import hash_block
from proa.contract import EngineCoreRequest, SamplingParams
from proa_engine.core.engine_core import EngineCore
from proa_engine.core.kv_cache_manager import KVCacheManager
from proa_engine.core.scheduler import Scheduler, SchedulerConfig
from proa_engine.core.types import ModelRunnerOutput, SchedulerOutput

NUM_STEPS = 320  # each request fills a block in every sixteenth


class InstantFuture:
    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        return self._output


class InstantExecutor:
    """Answers every row with the same token."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._request_ids = list(scheduler_output.num_scheduled_tokens)

    def sample_tokens(self) -> InstantFuture:
        tokens = [[7] for _ in self._request_ids]
        return InstantFuture(ModelRunnerOutput(request_ids=self._request_ids, sampled_token_ids=tokens))

    def shutdown(self) -> None:
        pass


def measure(num_requests: int, *, async_scheduling: bool) -> list[float]:
    """CPU milliseconds of each step."""
    config = SchedulerConfig(
        max_model_len=4096,
        max_num_seqs=num_requests,
        max_waiting_requests=num_requests,
        async_scheduling=async_scheduling,
    )
    manager = KVCacheManager(num_blocks=40_000, block_size=16, hash_block=hash_block)
    core = EngineCore(Scheduler(config, manager, eos_token_ids=frozenset({0})), InstantExecutor())
    for index in range(num_requests):
        params = SamplingParams(max_tokens=NUM_STEPS + 10)
        prompt = list(range(index, index + 20))
        core.submit(
            EngineCoreRequest(
                request_id=f"request-{index}", prompt_token_ids=prompt, sampling_params=params, arrival_time=0.0
            )
        )
    for _ in range(3):
        core.step()
    gc.collect()
    gc.freeze()
    costs = []
    for _ in range(NUM_STEPS):
        started = time.thread_time()
        core.step()
        costs.append((time.thread_time() - started) * 1e3)
    return costs


def main() -> None:
    print(f"{'requests':>8} {'async':>6} {'median ms':>10} {'mean ms':>8} {'max ms':>7}")
    for num_requests in (1, 64, 256):
        for async_scheduling in (True, False):
            costs = measure(num_requests, async_scheduling=async_scheduling)
            print(
                f"{num_requests:>8} {async_scheduling!s:>6} {statistics.median(costs):>10.3f}"
                f" {statistics.mean(costs):>8.3f} {max(costs):>7.3f}"
            )


if __name__ == "__main__":
    main()
