"""Sessions over engines, simulated: `python -m benchmarks.routing.session_sim --sessions 16 --mode wait`.

The gateway's `ModelSessions` are the real ones, and so is the score by which engines are chosen. Modes: `off`;
`retain`: sessions that fit keep their blocks; `wait`: the others wait for a place.
"""

import argparse
import heapq
import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

import numpy as np

from benchmarks.routing.session_engines import BLOCK_SIZE, Prompt, SimulatedEngine
from proa_cli.bench.session_options import SessionOptions
from proa_cli.bench.session_plans import Turn as PlannedTurn
from proa_cli.bench.session_plans import parse_one_shots, parse_subagents
from proa_gateway.routing.policies import WEIGHTS, best
from proa_gateway.sessions.model_sessions import ModelSessions
from proa_gateway.sessions.places import Places
from proa_gateway.sessions.session import Turn
from proa_gateway.sessions.session_table import SessionTable

Mode = Literal["off", "retain", "wait"]
TICK_SECONDS = 0.25
REPORT_SECONDS = 0.1
QUESTION_TOKENS = 128  # of a prompt about a document


@dataclass(slots=True, eq=False)
class Client:
    """One session, or one prompt of none. `path`: of its next prompt."""

    path: list[bytes]
    turns: deque[PlannedTurn]
    is_session: bool
    gateway: "SimulatedGateway"
    number: int = 0
    before: int = 0  # blocks of its last prompt
    parent: "tuple[Client, float] | None" = None  # the session that called it, and the gap before its next turn


@dataclass(slots=True, eq=False)
class Job:
    client: Client
    planned: PlannedTurn
    arrived: float
    turn: Turn | None = None


class SimulatedGateway:
    """Sends turns to engines, or lets them wait as `SessionQueue` does."""

    def __init__(
        self,
        number: int,
        mode: Mode,
        engines: Sequence[SimulatedEngine],
        simulation: "Simulation",
        max_wait: float,
    ) -> None:
        self.number, self.mode, self._simulation, self._max_wait = number, mode, simulation, max_wait
        self._engines = {engine.address: engine for engine in engines}
        self.sessions = ModelSessions(BLOCK_SIZE, lambda: simulation.now, self._count_cached)
        self._tables: dict[str, SessionTable] = {}
        for engine in engines:
            num_blocks = max(engine.cache.capacity, engine.host.capacity)
            self._tables[engine.address] = self.sessions.add(engine, num_blocks)
        self._waiting: deque[Job] = deque()
        self._head_since = 0.0
        self._rng = random.Random(number)

    def arrive(self, job: Job) -> None:
        path = job.client.path
        turn = self.sessions.expect(path) if self.mode == "wait" else None
        if (
            turn is None
            or self.sessions.passes(turn)
            or (not self._waiting and self.sessions.is_next and self.sessions.place(turn))
            or not self.sessions.may_fit(turn)
        ):
            self._submit(job)
            return
        job.turn = turn
        if not self._waiting:
            self._head_since = self._simulation.now
        if turn.session.is_awaited:
            num_before = sum(each.turn is not None and each.turn.session.is_awaited for each in self._waiting)
            self._waiting.insert(num_before, job)
        else:
            self._waiting.append(job)
        self.sessions.waiting[turn] = self._simulation.now

    def tick(self) -> None:
        self.sessions.tick()
        now = self._simulation.now
        while self._waiting and (turn := self._waiting[0].turn) is not None:
            is_late = now - self._waiting[0].arrived >= self._max_wait
            if not is_late and not self.sessions.admits(turn, self._head_since):
                break
            del self.sessions.waiting[turn]
            self._submit(self._waiting.popleft())
            self._head_since = now

    def report(self) -> None:
        """Tell engines what is claimed, and learn what others claim."""
        for engine in self._engines.values():
            engine.claims.set(self.number, self.sessions.claim(engine))
            stats = engine.stats_for(self.number)
            self.sessions.observe(engine, stats.num_claimed_elsewhere, stats.longest_wait_elsewhere)

    def drain(self, engine: SimulatedEngine) -> None:
        self.sessions.evacuate(engine)

    def places(self, engine: SimulatedEngine) -> Places:
        return self._tables[engine.address].places

    def _submit(self, job: Job) -> None:
        path = job.client.path
        engine = self._choose(path)
        table, turn, retain = self._tables[engine.address], None, False
        if self.mode != "off":
            turn = self.sessions.arrive(path, str(job.client.number) if job.client.number else None)
            retain = not turn.is_first and table.admit(turn, self._simulation.now)
            table.start(turn, self._simulation.now)
            engine.cache.release(table.places.take_released(), self.number)

        def on_end() -> int | None:
            if turn is not None:
                table.end(turn, (), self._simulation.now)
            self._simulation.ended(job)
            return self.number if retain else None

        engine.submit(
            Prompt(path, job.planned.output_tokens, lambda hits: self._simulation.computed(job, hits), on_end)
        )

    def _choose(self, path: Sequence[bytes]) -> SimulatedEngine:
        usable = {address: engine for address, engine in self._engines.items() if engine.usable}
        home = self.sessions.home(path)
        if home is not None and home.address in usable:
            return usable[home.address]
        by_length: dict[float, list[str]] = {}
        for address in usable:
            by_length.setdefault(float(self._count_cached(address, path)), []).append(address)
        matched = sorted(((length, each) for length, each in by_length.items() if length), reverse=True)
        return best(usable, matched, len(path), WEIGHTS, self._rng)

    def _count_cached(self, address: str, path: Sequence[bytes]) -> int:
        return self._engines[address].cache.num_hits(path)


@dataclass(slots=True)
class Figures:
    turns: int = 0
    prompt_blocks: int = 0
    hit_blocks: int = 0
    ideal_blocks: int = 0
    ttfts: list[float] = field(default_factory=list)
    one_shot_ttfts: list[float] = field(default_factory=list)
    one_shot_blocks: int = 0
    one_shot_hits: int = 0

    def row(self, hours: float) -> str:
        ttfts = sorted(self.ttfts)
        p50, p95 = statistics.median(ttfts), ttfts[int(0.95 * len(ttfts))]
        hits, ideal = self.hit_blocks / self.prompt_blocks, self.ideal_blocks / self.prompt_blocks
        shots = ""
        if self.one_shot_ttfts:
            cached = self.one_shot_hits / self.one_shot_blocks
            shots = f"  one-shot p50 {statistics.median(self.one_shot_ttfts):.2f} hit {cached:.3f}"
        return (
            f"turns/h {self.turns / hours:6.0f}  hit {hits:.3f}  of ideal {hits / ideal:.3f}  "
            f"TTFT p50 {p50:.2f} p95 {p95:.1f} max {ttfts[-1]:.0f}{shots}"
        )


class Simulation:
    def __init__(
        self,
        mode: Mode,
        options: SessionOptions,
        capacity: int,
        rate: float,
        seed: int,
        *,
        num_engines: int = 1,
        num_gateways: int = 1,
        drain_at: float | None = None,
        is_sticky: bool = True,
        max_wait: float = 120.0,
        host: int = 0,
        has_ids: bool = False,
        num_documents: int = 0,
        until: float = math.inf,
    ) -> None:
        """`capacity` in tokens and `rate` in tokens a second, of each engine. `drain_at`: when the first engine drains.
        `is_sticky`: all turns of a session come to one gateway. `host`: tokens of host memory. `has_ids`: turns name
        their session, and those of a sub-agent the one that called it. `num_documents`: each one-shot
        prompt is one of so many, and a question. `until`: when the last session begins."""
        self.options = options
        self.figures = Figures()
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self.engines = [
            SimulatedEngine(f"engine {number}", capacity, rate, lambda: self.now, self.at, host=host)
            for number in range(num_engines)
        ]
        self.gateways = [SimulatedGateway(number, mode, self.engines, self, max_wait) for number in range(num_gateways)]
        self._drain_at = drain_at
        self._is_sticky = is_sticky
        self._has_ids = has_ids
        self._numbers = count(1)
        self._draw = np.random.default_rng(seed)
        self._spread = random.Random(seed)
        self._blocks = count()
        self._shared = self._new_blocks(options.session_shared_len)
        self._until = until
        shots = options.session_one_shots
        self._documents = [self._new_blocks(shots.length) for _ in range(num_documents)] if shots is not None else []

    def run(self, seconds: float) -> Figures:
        for _ in range(self.options.sessions):
            self.at(float(self._draw.uniform(0, 1)), self._begin_session)
        if self.options.session_one_shots is not None:
            self.at(0.0, self._one_shot)
        for gateway in self.gateways:
            self.every(TICK_SECONDS, gateway.tick)
            self.every(REPORT_SECONDS, gateway.report)
        if self._drain_at is not None:
            self.at(self._drain_at, self._drain)
        while self._events and self._events[0][0] < seconds:
            self.now, _, event = heapq.heappop(self._events)
            event()
        return self.figures

    def at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def every(self, seconds: float, event: Callable[[], None]) -> None:
        def again() -> None:
            event()
            self.at(self.now + seconds, again)

        self.at(seconds, again)

    def computed(self, job: Job, hits: int) -> None:
        """A prompt has been computed, of which so many blocks were cached."""
        client, figures = job.client, self.figures
        if not client.is_session:
            figures.one_shot_ttfts.append(self.now - job.arrived)
            figures.one_shot_blocks += len(client.path)
            figures.one_shot_hits += hits
            return
        figures.ttfts.append(self.now - job.arrived)
        figures.prompt_blocks += len(client.path)
        figures.hit_blocks += hits
        figures.ideal_blocks += client.before or len(self._shared)

    def ended(self, job: Job) -> None:
        """An output is complete."""
        client = job.client
        if not client.is_session:
            return
        self.figures.turns += 1
        client.before, gap = len(client.path), job.planned.gap
        if job.planned.subagent:
            turns, caller = deque(job.planned.subagent), (client, gap)
            self._next_turn(Client(list(self._shared), turns, True, client.gateway, client.number, parent=caller))
            return
        if not client.turns and client.parent is not None:
            client, gap = client.parent
        if client.turns:
            self.at(self.now + gap, lambda: self._next_turn(client))
        else:
            self.at(self.now + 1.0, self._begin_session)

    def _begin_session(self) -> None:
        if self.now > self._until:
            return
        turns = deque(self.options.workload.plan(self._draw, 10_000))
        number = next(self._numbers) if self._has_ids else 0
        self._next_turn(Client(list(self._shared), turns, True, self._some_gateway(), number))

    def _next_turn(self, client: Client) -> None:
        planned = client.turns.popleft()
        client.path = client.path + self._new_blocks(planned.new_tokens)
        gateway = client.gateway if self._is_sticky else self._some_gateway()
        gateway.arrive(Job(client, planned, self.now))

    def _one_shot(self) -> None:
        shots = self.options.session_one_shots
        assert shots is not None
        if self._documents:
            path = self._spread.choice(self._documents) + self._new_blocks(QUESTION_TOKENS)
        else:
            path = self._new_blocks(shots.length)
        client = Client(path, deque(), is_session=False, gateway=self._some_gateway())
        client.gateway.arrive(Job(client, PlannedTurn(shots.length, 300, 0.0), self.now))
        self.at(self.now + float(self._draw.exponential(1 / shots.rate)), self._one_shot)

    def _drain(self) -> None:
        self.engines[0].usable = False
        for gateway in self.gateways:
            gateway.drain(self.engines[0])

    def _some_gateway(self) -> SimulatedGateway:
        return self._spread.choice(self.gateways)

    def _new_blocks(self, tokens: int) -> list[bytes]:
        return [next(self._blocks).to_bytes(8, "big") for _ in range(-(-tokens // BLOCK_SIZE))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, nargs="+", default=[8, 16, 24])
    parser.add_argument("--mode", choices=["off", "retain", "wait"], nargs="+", default=["off", "retain", "wait"])
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--spread", action="store_true", help="each turn comes to any gateway")
    parser.add_argument("--drain-at", type=float, help="minute at which the first engine drains")
    parser.add_argument("--capacity", type=int, default=600_000, help="tokens of an engine's cache")
    parser.add_argument("--rate", type=float, default=35_000, help="prompt tokens a second of an engine")
    parser.add_argument("--max-wait", type=float, default=120.0, help="as --session-max-wait")
    parser.add_argument("--host", type=int, default=0, help="tokens of an engine's host memory")
    parser.add_argument("--subagents", type=parse_subagents, help="as --session-subagents")
    parser.add_argument("--ids", action="store_true", help="turns name their sessions, as with --session-header")
    parser.add_argument("--one-shots", type=parse_one_shots, help="as --session-one-shots")
    parser.add_argument("--documents", type=int, default=0, help="one-shot prompts are one of so many, and a question")
    parser.add_argument("--until", type=float, default=math.inf, help="minute at which the last session begins")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    for sessions in args.sessions:
        for mode in args.mode:
            for seed in range(args.seeds):
                simulation = Simulation(
                    mode,
                    SessionOptions(
                        sessions=sessions, session_subagents=args.subagents, session_one_shots=args.one_shots
                    ),
                    args.capacity,
                    args.rate,
                    seed,
                    num_engines=args.engines,
                    num_gateways=args.gateways,
                    drain_at=None if args.drain_at is None else 60 * args.drain_at,
                    is_sticky=not args.spread,
                    max_wait=args.max_wait,
                    host=args.host,
                    has_ids=args.ids,
                    num_documents=args.documents,
                    until=60 * args.until,
                )
                figures = simulation.run(60 * args.minutes)
                print(f"{sessions:3} {mode:6} seed {seed}: {figures.row(args.minutes / 60)}", flush=True)


if __name__ == "__main__":
    main()
