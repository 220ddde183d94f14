"""Sends the turns of sessions: a client sends its session's next turn when the last one has ended and its gap is over,
then begins another session."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from proa_cli.bench.client import Call, Sample
from proa_cli.bench.load import Measured, Send, run_until
from proa_cli.bench.session_figures import SessionSample, session_sections
from proa_cli.bench.session_plans import OneShots, Workload
from proa_cli.bench.session_prompts import DrawnSessions, Prompt, Sessions, TracedSessions, TracedTurn, Write

MakeCall = Callable[[Sequence[str], int, int], Call]
"""Makes a request of a prompt's parts, an output's length and the session's number, which is negative for a one-shot
prompt. The parts are by turns the user's and the model's."""


@dataclass(frozen=True, slots=True)
class SessionLoad:
    """`sessions` at once, until all together have sent `turns` turns; the last session is as short as that takes. After
    `seconds` what still runs is abandoned. One-shot prompts are sent until then. `trace`: sessions in place of those of
    the workload, with at least so many turns; empty: none."""

    workload: Workload
    sessions: int
    turns: int
    one_shots: OneShots | None
    seconds: float
    seed: int
    trace: Sequence[Sequence[TracedTurn]] = ()

    def open(self, write: Write) -> Sessions:
        """Makes the text that drawn sessions share, which takes a while."""
        if self.trace:
            return TracedSessions(self.trace, write, self.seed)
        shared = write(self.workload.shared_tokens, np.random.default_rng([self.seed, 2, 0]))
        return DrawnSessions(self.workload, write, self.seed, shared)


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
        sessions = await asyncio.to_thread(load.open, self._write)
        async with asyncio.TaskGroup() as beside:
            shots = beside.create_task(self._send_one_shots(load.one_shots)) if load.one_shots else None
            async with asyncio.TaskGroup() as clients:
                for _ in range(load.sessions):
                    clients.create_task(self._client(sessions))
            if shots is not None:
                shots.cancel()

    async def _client(self, sessions: Sessions) -> None:
        while self._turns_left:
            self._begun += 1
            number = self._begun
            num_turns, prompts = sessions.begin(number, self._turns_left)
            self._turns_left -= num_turns
            await self._session(number, prompts)

    async def _session(self, number: int, prompts: Iterator[Prompt]) -> None:
        """Send the turns of a session, or of a sub-agent of one."""
        time = asyncio.get_running_loop().time
        before, index, at = 0, 0, time()
        while (prompt := await asyncio.to_thread(next, prompts, None)) is not None:
            await asyncio.sleep(at - time())
            sample = await self._send(self._make_call(prompt.parts, prompt.output_tokens, number))
            before = before if prompt.tokens_before is None else prompt.tokens_before
            self.turns.append(SessionSample(number, index, before, sample))
            self._ended(sample)
            before, index = sample.prompt_tokens or before, index + 1
            await self._session(number, iter(prompt.subagent))
            at = time() + prompt.gap

    async def _send_one_shots(self, shots: OneShots) -> None:
        async with asyncio.TaskGroup() as running:
            number = 0
            while True:
                number += 1
                draw = np.random.default_rng([self._load.seed, 2, 0, number])
                await asyncio.sleep(float(draw.exponential(1 / shots.rate)))
                running.create_task(self._one_shot(shots.length, number, draw))

    async def _one_shot(self, length: int, number: int, draw: np.random.Generator) -> None:
        text = await asyncio.to_thread(self._write, length, draw)
        call = self._make_call([text], self._load.workload.output_length(draw), -number)
        self.one_shots.append(await self._send(call))
