"""Routing over many replicas, simulated: `python -m benchmarks.routing.simulation --replicas 64 --workload rag`.

The scheduler core, its KV events, the policies and the index are the real ones; time and the device are simulated. A
step takes what it takes for Llama-3.1-8B on an H200: 1 ms, plus 4 ms for the weights or 21.5 us per token, whichever is
more, plus 35 ns per context token that a decode reads.
"""

import argparse
import heapq
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from benchmarks.routing.workloads import ANSWER_TOKEN, WORKLOADS, Ask
from proa.blocks import checkpoint_positions, hash_block, hash_blocks, root_hash
from proa.contract import CheckpointRule, EngineCoreRequest, SamplingParams, SchedulerStats
from proa_engine.core.engine_core import EngineCore
from proa_engine.core.grammar import GrammarMasks
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.kv.kv_cache_manager import KVCacheManager
from proa_engine.core.scheduler import Scheduler
from proa_engine.core.scheduler_config import SchedulerConfig
from proa_engine.core.types import ModelRunnerOutput, RowOutput, SchedulerOutput, StepOutputs
from proa_gateway.engines.engine_loras import EngineLoras
from proa_gateway.routing.index import PrefixIndex
from proa_gateway.routing.policies import POLICIES, HashChain, RoutingHints, make_policy

BLOCK_SIZE = 16
CHAIN = HashChain(root_hash("simulated", ""), BLOCK_SIZE)
EVENT_SECONDS = 0.002  # from an engine to a gateway
RULE = CheckpointRule(interval=512, min_junction=256)  # of a model with windows of 128 tokens, as gpt-oss has them
WINDOW = 128
MAX_STEP_TOKENS = 4096


class Future:
    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        return self._output


class SimulatedDevice:
    """An executor that computes nothing, only how long the step would take."""

    def __init__(self) -> None:
        self.seconds: float | None = None  # of the last step
        self._num_tokens: dict[str, int] = {}  # known, by request
        self._num_computed: dict[str, int] = {}  # by request

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        for request_id in (*scheduler_output.finished_request_ids, *scheduler_output.preempted_request_ids):
            del self._num_tokens[request_id], self._num_computed[request_id]
        context = sum(self._num_computed.get(request_id, 0) for request_id in scheduler_output.num_scheduled_tokens)
        self._output = ModelRunnerOutput(plain_token_ids=[])
        for new in scheduler_output.new_requests:
            self._num_tokens[new.request_id] = len(new.token_ids)
            self._num_computed[new.request_id] = new.num_computed_tokens
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            self._num_computed[request_id] += num_tokens
            if self._num_computed[request_id] == self._num_tokens[request_id]:
                self._num_tokens[request_id] += 1
                self._output.plain_token_ids.append(ANSWER_TOKEN)
            else:
                self._output.others[request_id] = RowOutput()
        self.seconds = 1e-3 + max(4e-3, 21.5e-6 * scheduler_output.total_num_scheduled_tokens) + 35e-9 * context

    def draft_tokens(self) -> dict[int, list[int]]:
        return {}

    def sample_tokens(self, masks: GrammarMasks | None = None) -> Future:
        return Future(self._output)

    def sleep(self, level: int) -> None:
        raise NotImplementedError

    def wake_up(self) -> None:
        raise NotImplementedError

    def shutdown(self) -> None:
        pass


@dataclass(slots=True)
class ReplicaState:
    """A replica's state as known to a gateway."""

    address: str
    load: int = 0
    kv_cache_usage: float = 0.0
    loras: EngineLoras = field(default_factory=lambda: EngineLoras("", lambda lora, model: None))


class Gateway:
    def __init__(self, addresses: Sequence[str], seed: int, sim: "Simulation"):
        self.index = PrefixIndex()
        self.policy = make_policy(sim.policy, self.index, random.Random(seed), lambda: sim.now)
        self.replicas = [ReplicaState(address) for address in addresses]
        self._candidates = {replica.address: replica for replica in self.replicas}
        self.pick_seconds: list[float] = []
        for address in addresses:
            self.index.add_replica(address, CHAIN, sim.blocks, RULE if sim.has_windows else None)
            if not sim.events:
                self.index.disable_events(address)

    def pick(self, hints: RoutingHints) -> tuple[int, int]:
        """Return the number of the chosen replica, and how many prompt tokens it is expected to have cached."""
        started = time.perf_counter()
        chosen = self.policy.choose(self._candidates, hints)
        self.pick_seconds.append(time.perf_counter() - started)
        chosen.load += 1
        return self.replicas.index(chosen), self.policy.record_sent(chosen.address, hints)

    def receive(self, number: int, outputs: StepOutputs, stats: SchedulerStats, events: bool) -> None:
        replica = self.replicas[number]
        replica.load = stats.num_running_reqs + stats.num_waiting_reqs
        replica.kv_cache_usage = stats.kv_cache_usage
        if events and self.policy.needs_hashes and outputs.kv_events is not None:
            blocks, checkpoints = outputs.kv_events.changes, outputs.kv_events.checkpoints
            self.index.remove_confirmed(replica.address, list(blocks.removed))
            self.index.add_confirmed(replica.address, list(blocks.stored))
            self.index.remove_checkpoints(replica.address, list(checkpoints.removed))
            self.index.add_checkpoints(replica.address, list(checkpoints.stored))


class Replica:
    def __init__(self, number: int, sim: "Simulation") -> None:
        self.number = number
        self.is_busy = False
        self.device = SimulatedDevice()
        groups = CacheGroups(num_blocks=sim.blocks, block_size=BLOCK_SIZE)
        if sim.has_windows:
            groups = replace(
                groups,
                windows=(WINDOW,),
                checkpoint_interval=RULE.interval,
                min_junction=RULE.min_junction,
                max_step_tokens=MAX_STEP_TOKENS,
            )
        manager = KVCacheManager(
            groups, hash_block=hash_block, root_hash=CHAIN.root, checkpoint_positions=checkpoint_positions
        )
        config = SchedulerConfig(
            max_model_len=16384,
            max_num_seqs=256,
            max_num_batched_tokens=MAX_STEP_TOKENS,
            max_waiting_requests=100_000,
            async_scheduling=False,
        )
        self.core = EngineCore(Scheduler(config, manager), self.device, clock=lambda: sim.now)
        self.core.follow_kv_events()


@dataclass(slots=True)
class Result:
    """The result of a request."""

    ask: Ask
    num_expected: int
    num_cached: int = 0
    first_token: float | None = None  # seconds after it was asked


@dataclass
class Simulation:
    """A queue of events in simulated time."""

    policy: str
    num_replicas: int
    num_gateways: int = 1
    events: bool = True
    has_windows: bool = False  # in half of the model's layers
    blocks: int = 8192
    seed: int = 1
    now: float = 0.0
    results: dict[str, Result] = field(default_factory=dict)

    def __post_init__(self) -> None:
        addresses = [f"10.0.{number // 256}.{number % 256}:50051" for number in range(self.num_replicas)]
        self._rng = random.Random(self.seed)
        self._replicas = [Replica(number, self) for number in range(self.num_replicas)]
        self.gateways = [Gateway(addresses, seed, self) for seed in range(self.num_gateways)]
        self._queue: list[tuple[float, int, object]] = []
        self._order = count()

    def run(self, asks: Iterable[Ask]) -> None:
        for ask in asks:
            self._push(ask.at, ask)
        while self._queue:
            self.now, _, event = heapq.heappop(self._queue)
            match event:
                case Ask():
                    self._ask(event)
                case (Replica() as replica, StepOutputs() | None as outputs):
                    self._step_ended(replica, outputs)
                case (int() as number, StepOutputs() as outputs, SchedulerStats() as stats):
                    for gateway in self.gateways:
                        gateway.receive(number, outputs, stats, self.events)

    def _push(self, at: float, event: object) -> None:
        heapq.heappush(self._queue, (at, next(self._order), event))

    def _ask(self, ask: Ask) -> None:
        gateway = self._rng.choice(self.gateways)
        hashes = hash_blocks(CHAIN.root, ask.prompt, BLOCK_SIZE) if gateway.policy.needs_hashes else []
        hints = RoutingHints(hashes, CHAIN, len(ask.prompt), ask.session_id)
        number, expected = gateway.pick(hints)
        request_id = str(len(self.results))
        self.results[request_id] = Result(ask, expected)
        replica = self._replicas[number]
        params = SamplingParams(max_tokens=ask.num_output_tokens)
        replica.core.submit(
            EngineCoreRequest(
                request_id=request_id, prompt_token_ids=ask.prompt, sampling_params=params, arrival_time=self.now
            )
        )
        if not replica.is_busy:
            self._step(replica)

    def _step(self, replica: Replica) -> None:
        replica.device.seconds = None
        outputs = replica.core.step()
        replica.is_busy = outputs is not None or replica.device.seconds is not None
        if replica.is_busy:
            self._push(self.now + (replica.device.seconds or 0.0), (replica, outputs))

    def _step_ended(self, replica: Replica, outputs: StepOutputs | None) -> None:
        if outputs is not None:
            self._push(self.now + EVENT_SECONDS, (replica.number, outputs, replica.core.stats()))
            for output in outputs.outputs:
                result = self.results[output.request_id]
                if result.first_token is None:
                    result.first_token = self.now - result.ask.at
                    result.num_cached = output.num_cached_tokens or 0
                if output.finish_reason is not None and (following := result.ask.then(self.now)) is not None:
                    self._push(following.at, following)
        self._step(replica)


def report(name: str, sim: Simulation, warm_up: float) -> None:
    results = [result for result in sim.results.values() if result.ask.at >= warm_up]
    tokens = sum(len(result.ask.prompt) for result in results)
    cached = sum(result.num_cached for result in results)
    exact = sum(result.num_cached == result.num_expected for result in results) / len(results)
    cuts = statistics.quantiles([1e3 * (result.first_token or 0.0) for result in results], n=100)
    picks = statistics.quantiles([1e6 * second for gate in sim.gateways for second in gate.pick_seconds], n=100)
    index = sim.gateways[0].index
    print(
        f"{name:12} {len(results):7,} requests  hit {cached / tokens:6.1%}  TTFT ms p50 {cuts[49]:7.1f}"
        f"  p90 {cuts[89]:8.1f}  p99 {cuts[98]:8.1f}  choice us p50 {picks[49]:4.0f} p99 {picks[98]:5.0f}",
        flush=True,
    )
    if index.num_blocks:
        size = f"{index.num_blocks:,} blocks, {index.num_bytes / 2**20:.0f} MiB"
        print(f"{'':12} index of {size}; cached tokens expected exactly for {exact:.1%} of requests", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--workload", choices=WORKLOADS, default="rag")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--rate", type=float, default=6.0, help="requests per second and replica")
    parser.add_argument("--seconds", type=float, default=12.0, help="of arrivals; the first third is not counted")
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--no-events", action="store_true", help="engines without KV events")
    parser.add_argument(
        "--windows", action="store_true", help="a model with sliding windows, whose hits end at checkpoints"
    )
    arguments = parser.parse_args()
    print(f"{arguments.workload}, {arguments.replicas} replicas, {arguments.rate:g} requests per second and replica")
    for policy in arguments.policies:
        events = not arguments.no_events
        sim = Simulation(policy, arguments.replicas, arguments.gateways, events, arguments.windows)
        rate, rng = arguments.rate * arguments.replicas, random.Random(2)
        sim.run(WORKLOADS[arguments.workload](rng, rate, arguments.seconds, arguments.replicas))
        report(policy, sim, arguments.seconds / 3)


if __name__ == "__main__":
    main()
