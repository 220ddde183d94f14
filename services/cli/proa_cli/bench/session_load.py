"""Sends the turns of sessions: a client sends its session's next turn when the last one has ended and its gap is over,
then begins another session."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from proa_cli.bench.client import Call, Sample
from proa_cli.bench.load import Measured, Send, run_until
from proa_cli.bench.session_figures import SessionSample, session_sections
from proa_cli.bench.session_plans import OneShots, Workload

Write = Callable[[int, np.random.Generator], str]
"""Makes a text of so many tokens."""
MakeCall = Callable[[Sequence[str], int, int], Call]
"""Makes a request of a prompt's parts, an output's length and the session's number. The parts are by turns the user's
and the model's."""


@dataclass(frozen=True, slots=True)
class SessionLoad:
    """`sessions` at once, until all together have sent `turns` turns; the last session is as short as that takes. After
    `seconds` what still runs is abandoned. One-shot prompts are sent until then."""

    workload: Workload
    sessions: int
    turns: int
    one_shots: OneShots | None
    seconds: float
    seed: int

    def draw(self, *numbers: int) -> np.random.Generator:
        """Of a session or one-shot prompt, whatever the order in which they begin."""
        return np.random.default_rng([self.seed, 2, *numbers])


async def run_sessions(
    load: SessionLoad,
    write: Write,
    make_call: MakeCall,
    send: Send,
    ended: Callable[[Sample], None],
    stop: asyncio.Event,
) -> Measured:
    """Run until all turns have ended, until `load.seconds` are over or `stop` is set. `ended` is called with the sample
    of each turn at once; texts are made in threads, within the gaps."""
    run = _Run(load, write, make_call, send, ended)
    elapsed = await run_until(run.all(), load.seconds, stop)
    in_order = sorted(run.turns, key=lambda each: each.sample.start)
    sections = session_sections(in_order, run.one_shots, elapsed.seconds)
    samples = [each.sample for each in in_order] + run.one_shots
    return Measured(samples, load.turns - len(in_order), elapsed, sections)


class _Run:
    """What has been sent and measured so far."""

    def __init__(
        self, load: SessionLoad, write: Write, make_call: MakeCall, send: Send, ended: Callable[[Sample], None]
    ) -> None:
        self._load, self._write, self._make_call, self._send, self._ended = load, write, make_call, send, ended
        self._turns_left, self._begun = load.turns, 0
        self.turns: list[SessionSample] = []
        self.one_shots: list[Sample] = []

    async def all(self) -> None:
        load = self._load
        shared = await asyncio.to_thread(self._write, load.workload.shared_tokens, load.draw(0))
        async with asyncio.TaskGroup() as beside:
            shots = beside.create_task(self._send_one_shots(load.one_shots)) if load.one_shots else None
            async with asyncio.TaskGroup() as clients:
                for _ in range(load.sessions):
                    clients.create_task(self._client(shared))
            if shots is not None:
                shots.cancel()

    async def _client(self, shared: str) -> None:
        while self._turns_left:
            self._begun += 1
            await self._session(self._begun, shared)

    async def _session(self, number: int, shared: str) -> None:
        draw = self._load.draw(number)
        turns = self._load.workload.plan(draw, self._turns_left)
        self._turns_left -= len(turns)
        parts: list[str] = []
        before, gap, answer_tokens = self._load.workload.shared_tokens, 0.0, 0
        for index, turn in enumerate(turns):
            _, new = await asyncio.gather(
                asyncio.sleep(gap), asyncio.to_thread(self._parts, turn.new_tokens, answer_tokens, draw)
            )
            parts += new if index else [shared + new[0]]
            sample = await self._send(self._make_call(parts, turn.output_tokens, number))
            self.turns.append(SessionSample(number, index, before, sample))
            self._ended(sample)
            before, gap = sample.prompt_tokens or before, turn.gap
            answer_tokens = turn.output_tokens

    def _parts(self, new_tokens: int, answer_tokens: int, draw: np.random.Generator) -> list[str]:
        """The model's part, in the place of what it has answered, and the user's; a first turn has no answer."""
        answered = min(answer_tokens, new_tokens - 1)
        lengths = [answered, new_tokens - answered] if answered else [new_tokens]
        return [self._write(length, draw) for length in lengths]

    async def _send_one_shots(self, shots: OneShots) -> None:
        async with asyncio.TaskGroup() as running:
            number = 0
            while True:
                number += 1
                draw = self._load.draw(0, number)
                await asyncio.sleep(float(draw.exponential(1 / shots.rate)))
                running.create_task(self._one_shot(shots.length, number, draw))

    async def _one_shot(self, length: int, number: int, draw: np.random.Generator) -> None:
        text = await asyncio.to_thread(self._write, length, draw)
        call = self._make_call([text], self._load.workload.output_length(draw), number)
        self.one_shots.append(await self._send(call))
