"""Sessions over one engine, simulated: `python -m benchmarks.routing.session_sim --sessions 16 --mode wait`.

The gateway's `SessionTable` is the real one. The engine computes prompts one after the other at a fixed rate, decodes
each stream at a fixed speed, and evicts blocks as `BlockPool` does. Modes: `off`; `retain`: sessions that fit keep
their blocks; `wait`: the others wait for a place.
"""

import argparse
import heapq
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

import numpy as np

from proa_cli.bench.session_options import SessionOptions
from proa_cli.bench.session_plans import Turn as PlannedTurn
from proa_gateway.sessions.session_table import SessionTable, Turn

Mode = Literal["off", "retain", "wait"]
BLOCK_SIZE = 16
TICK_SECONDS = 0.25
DECODE_SPEED = 80.0  # tokens a second of one stream


class Cache:
    """Blocks by number. Free ones are evicted from the front of `free`, then from that of `retained`."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: dict[bytes, int] = {}
        self.free: OrderedDict[bytes, None] = OrderedDict()
        self.retained: OrderedDict[bytes, None] = OrderedDict()
        self.marked: set[bytes] = set()

    def num_hits(self, path: Sequence[bytes]) -> int:
        for index, block in enumerate(path):
            if block not in self.used and block not in self.free and block not in self.retained:
                return index
        return len(path)

    def take(self, path: Sequence[bytes]) -> bool:
        """Use the blocks of a path; those that are missing take the place of free ones. False if too few are free."""
        missing = sum(block not in self.used for block in path)
        if len(self.used) + missing > self.capacity:
            return False
        for block in path:
            self.used[block] = self.used.get(block, 0) + 1
            self.free.pop(block, None)
            self.retained.pop(block, None)
        while len(self.used) + len(self.free) + len(self.retained) > self.capacity:
            block, _ = (self.free or self.retained).popitem(last=False)
            self.marked.discard(block)
        return True

    def give(self, path: Sequence[bytes], *, retain: bool) -> None:
        if retain:
            self.marked.update(path)
        for block in reversed(path):
            self.used[block] -= 1
            if not self.used[block]:
                del self.used[block]
                (self.retained if block in self.marked else self.free)[block] = None

    def release(self, blocks: Sequence[bytes]) -> None:
        for block in blocks:
            self.marked.discard(block)
            if block in self.retained:
                del self.retained[block]
                self.free[block] = None
                self.free.move_to_end(block, last=False)


@dataclass(slots=True, eq=False)
class Client:
    """One session. `path`: of its next prompt."""

    path: list[bytes]
    turns: deque[PlannedTurn]
    before: int = 0  # blocks of its last prompt


@dataclass(slots=True, eq=False)
class Job:
    client: Client
    planned: PlannedTurn
    arrived: float
    turn: Turn | None = None


@dataclass(slots=True)
class Figures:
    turns: int = 0
    prompt_blocks: int = 0
    hit_blocks: int = 0
    ideal_blocks: int = 0
    ttfts: list[float] = field(default_factory=list)
    one_shot_ttfts: list[float] = field(default_factory=list)

    def row(self, hours: float) -> str:
        ttfts = sorted(self.ttfts)
        p50, p95 = statistics.median(ttfts), ttfts[int(0.95 * len(ttfts))]
        hits, ideal = self.hit_blocks / self.prompt_blocks, self.ideal_blocks / self.prompt_blocks
        shots = f" one-shot p50 {statistics.median(self.one_shot_ttfts):.2f}" if self.one_shot_ttfts else ""
        return (
            f"turns/h {self.turns / hours:6.0f}  hit {hits:.3f}  of ideal {hits / ideal:.3f}  "
            f"TTFT p50 {p50:.2f} p95 {p95:.1f} max {ttfts[-1]:.0f}{shots}"
        )


class Simulation:
    def __init__(self, mode: Mode, options: SessionOptions, capacity: int, rate: float, seed: int) -> None:
        """`capacity` in tokens, `rate` in tokens a second."""
        self.mode, self.options = mode, options
        self.rate = rate / BLOCK_SIZE
        self.cache = Cache(capacity // BLOCK_SIZE)
        self.table = SessionTable(capacity // BLOCK_SIZE)
        self.figures = Figures()
        self.now = 0.0
        self.waiting: deque[Job] = deque()  # for a place
        self.queued: deque[Job] = deque()  # in the engine
        self.head_since = 0.0
        self.is_computing = False
        self._draw = np.random.default_rng(seed)
        self._blocks = count()
        self._shared = self._new_blocks(options.session_shared_len)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def run(self, seconds: float) -> Figures:
        for _ in range(self.options.sessions):
            self.at(float(self._draw.uniform(0, 1)), self.begin_session)
        if self.options.session_one_shots is not None:
            self.at(0.0, self.one_shot)
        if self.mode == "wait":
            self.at(TICK_SECONDS, self.tick)
        while self._events and self._events[0][0] < seconds:
            self.now, _, event = heapq.heappop(self._events)
            event()
        return self.figures

    def at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def begin_session(self) -> None:
        client = Client(list(self._shared), deque(self.options.workload.plan(self._draw, 10_000)))
        self.next_turn(client)

    def next_turn(self, client: Client) -> None:
        planned = client.turns.popleft()
        client.path = client.path + self._new_blocks(planned.new_tokens)
        self.arrive(Job(client, planned, self.now))

    def one_shot(self) -> None:
        shots = self.options.session_one_shots
        assert shots is not None
        client = Client(self._new_blocks(shots.length), deque())
        self.arrive(Job(client, PlannedTurn(shots.length, 300, 0.0), self.now))
        self.at(self.now + float(self._draw.exponential(1 / shots.rate)), self.one_shot)

    def arrive(self, job: Job) -> None:
        if self.mode == "off":
            self.submit(job)
            return
        job.turn = turn = self.table.arrive(job.client.path, self.now)
        if turn.is_first or (not self.waiting and self.table.admit(turn, self.now)) or self.mode == "retain":
            self.submit(job)
            return
        if turn.session.is_resident:
            self.submit(job)
            return
        if not self.waiting:
            self.head_since = self.now
        self.waiting.append(job)

    def tick(self) -> None:
        self.table.tick(self.now, is_waiting=bool(self.waiting), is_busy=bool(self.queued))
        while self.waiting and (turn := self.waiting[0].turn) is not None:
            may_go = self.table.admit(turn, self.now)
            if not may_go and not self.table.displace(turn, self.now, self.rate, self.head_since):
                break
            self.submit(self.waiting.popleft())
            self.head_since = self.now
        self.at(self.now + TICK_SECONDS, self.tick)

    def submit(self, job: Job) -> None:
        if job.turn is not None:
            self.table.start(job.turn, self.now)
            self.cache.release(self.table.places.take_released())
        self.queued.append(job)
        self.compute()

    def compute(self) -> None:
        if self.is_computing or not self.queued:
            return
        job = self.queued[0]
        path = job.client.path
        hits = self.cache.num_hits(path)
        if not self.cache.take(path):
            return
        self.queued.popleft()
        self.is_computing = True
        if len(job.client.turns) or job.client.before:
            self.figures.prompt_blocks += len(path)
            self.figures.hit_blocks += hits
            self.figures.ideal_blocks += job.client.before or len(self._shared)
        self.at(self.now + (len(path) - hits + 1) / self.rate, lambda: self.computed(job))

    def computed(self, job: Job) -> None:
        self.is_computing = False
        is_session = len(job.client.turns) or job.client.before
        (self.figures.ttfts if is_session else self.figures.one_shot_ttfts).append(self.now - job.arrived)
        self.at(self.now + job.planned.output_tokens / DECODE_SPEED, lambda: self.decoded(job))
        self.compute()

    def decoded(self, job: Job) -> None:
        client = job.client
        is_session = len(client.turns) or client.before
        retain = False
        if job.turn is not None:
            retain = job.turn.session.is_resident
            self.table.end(job.turn, (), self.now)
        self.cache.give(client.path, retain=retain)
        if is_session:
            self.figures.turns += 1
            client.before = len(client.path)
            if client.turns:
                self.at(self.now + job.planned.gap, lambda: self.next_turn(client))
            else:
                self.at(self.now + 1.0, self.begin_session)
        self.compute()

    def _new_blocks(self, tokens: int) -> list[bytes]:
        return [next(self._blocks).to_bytes(8, "big") for _ in range(-(-tokens // BLOCK_SIZE))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, nargs="+", default=[8, 16, 24])
    parser.add_argument("--mode", choices=["off", "retain", "wait"], nargs="+", default=["off", "retain", "wait"])
    parser.add_argument("--capacity", type=int, default=600_000, help="tokens of the cache")
    parser.add_argument("--rate", type=float, default=35_000, help="prompt tokens a second")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    for sessions in args.sessions:
        for mode in args.mode:
            for seed in range(args.seeds):
                options = SessionOptions(sessions=sessions)
                figures = Simulation(mode, options, args.capacity, args.rate, seed).run(60 * args.minutes)
                print(f"{sessions:3} {mode:6} seed {seed}: {figures.row(args.minutes / 60)}", flush=True)


if __name__ == "__main__":
    main()
