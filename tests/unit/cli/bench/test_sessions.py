"""Sessions of a benchmark: what each turn's prompt is, how many are sent, and the figures."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import orjson
import pytest

from proa_cli.bench.client import Call, Sample
from proa_cli.bench.load import Measured
from proa_cli.bench.options import ServerOptions
from proa_cli.bench.requests import Requests
from proa_cli.bench.session_figures import SessionSample, session_sections
from proa_cli.bench.session_load import SessionLoad, run_sessions
from proa_cli.bench.session_options import SessionOptions
from proa_cli.bench.session_plans import (
    Agents,
    Evenly,
    LogNormal,
    OneShots,
    Subagents,
    Workload,
    parse_distribution,
    parse_one_shots,
    parse_subagents,
)
from proa_cli.bench.session_prompts import read_trace


def fixed(number: float) -> Evenly:
    return Evenly(number, number)


def workload(**changes: Evenly | int | Subagents) -> Workload:
    fields = {"turns": fixed(3), "first": fixed(4), "growth": fixed(5), "outputs": fixed(2), "gaps": fixed(0)}
    return Workload(**{"shared_tokens": 6, **fields, **changes})  # type: ignore[arg-type]


@dataclass
class Server:
    """Answers calls together, as many at once as `together` says. Its prompts have one token a letter."""

    together: asyncio.Barrier = field(default_factory=lambda: asyncio.Barrier(1))
    prompts: list[tuple[int, str]] = field(default_factory=list)

    def make_call(self, parts: Sequence[str], output_tokens: int, number: int) -> Call:
        self.prompts.append((number, "|".join(parts)))
        return Call("", orjson.dumps([number, "".join(parts), output_tokens]), {}, None)

    async def send(self, call: Call) -> Sample:
        async with self.together:
            _, prompt, output_tokens = orjson.loads(call.body)
            return Sample(0.0, ttft=0.1, prompt_tokens=len(prompt), output_tokens=output_tokens)

    def prompts_of(self, session: int) -> list[str]:
        return [prompt for number, prompt in self.prompts if number == session]


def write(tokens: int, draw: np.random.Generator) -> str:
    return "".join(chr(97 + letter) for letter in draw.integers(0, 26, size=tokens))


async def run(server: Server, load: SessionLoad) -> Measured:
    return await run_sessions(load, write, server.make_call, server.send, lambda sample: None, asyncio.Event())


def load(
    turns: int, sessions: int = 1, shots: OneShots | None = None, **changes: Evenly | int | Subagents
) -> SessionLoad:
    return SessionLoad(workload(**changes), sessions, turns, shots, seconds=60.0, seed=7)


async def test_a_prompt_is_that_of_the_turn_before_and_what_is_new() -> None:
    server = Server()
    await run(server, load(turns=3))
    first, second, third = server.prompts_of(1)
    assert len(first) == 6 + 4
    assert second.startswith(f"{first}|")
    assert third.startswith(f"{second}|")
    assert [len(part) for part in third.split("|")] == [10, 2, 3, 2, 3]  # the answer's place has the answer's length


async def test_sessions_share_their_beginning_and_nothing_else() -> None:
    server = Server()
    await run(server, load(turns=6))
    assert [number for number, _ in server.prompts] == [1, 1, 1, 2, 2, 2]
    one, other = server.prompts_of(1)[0], server.prompts_of(2)[0]
    assert one[:6] == other[:6]
    assert one[6:] != other[6:]


async def test_a_session_is_the_same_whatever_runs_beside_it() -> None:
    alone, beside = Server(), Server(asyncio.Barrier(4))
    await run(alone, load(turns=12))
    await run(beside, load(turns=12, sessions=4))
    assert [alone.prompts_of(number) for number in range(1, 5)] == [beside.prompts_of(number) for number in range(1, 5)]


async def test_the_last_session_is_as_short_as_the_number_of_turns_takes() -> None:
    server = Server()
    measured = await run(server, load(turns=5))
    assert [number for number, _ in server.prompts] == [1, 1, 1, 2, 2]
    assert (len(measured.samples), measured.unfinished) == (5, 0)


async def test_a_turn_waits_for_the_sub_agent_that_the_turn_before_called() -> None:
    server = Server()
    measured = await run(server, load(turns=9, subagents=Subagents(1.0, 2)))
    first, call, again, second, other = server.prompts_of(1)[:5]
    assert call[:6] == first[:6]
    assert not call.startswith(first)
    assert again.startswith(f"{call}|")
    assert second.startswith(f"{first}|")
    assert other[:10] not in (first, call)
    assert len(measured.samples) == 9


async def test_the_last_sub_agent_is_as_short_as_the_number_of_turns_takes() -> None:
    server = Server()
    measured = await run(server, load(turns=5, subagents=Subagents(1.0, 3)))
    assert (len(measured.samples), measured.unfinished) == (5, 0)


def traced(path: Path, *turns: tuple[str, int, list[int]]) -> Path:
    keys = ("session", "turn", "hash_ids")
    lines = [{**dict(zip(keys, turn, strict=True)), "output_tokens": 3, "gap": 0} for turn in turns]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


async def test_prompts_of_a_trace_have_the_text_of_their_blocks(tmp_path: Path) -> None:
    trace = read_trace(traced(tmp_path / "trace", ("b", 1, [7, 8, 9]), ("a", 0, [7, 4]), ("b", 0, [7, 8])))
    server = Server()
    measured = await run(server, replace(load(turns=3), trace=trace))
    (first, second), (other,) = server.prompts_of(1), server.prompts_of(2)
    assert (len(first), len(second), len(other)) == (1024, 1536, 1024)
    assert second.startswith(first)
    assert other[:512] == first[:512]
    assert other[512:] != first[512:]
    rows = {row.key: row.value for section in measured.sections for row in section.rows}
    assert rows["ideal_cached_share"] == pytest.approx((1024 + 512) / (1024 + 1536 + 1024))


@pytest.mark.parametrize(
    "line", ["", "[]", "{}", '{"session": 1, "turn": 0, "hash_ids": [], "output_tokens": 1, "gap": 0}']
)
def test_a_line_of_a_trace_that_is_no_turn_is_named(line: str, tmp_path: Path) -> None:
    path = traced(tmp_path / "trace", ("a", 0, [1]))
    path.write_text(f"{path.read_text()}\n{line}\n")
    with pytest.raises(ValueError, match="trace, line 2 is not a turn of a session"):
        read_trace(path)


async def test_one_shot_prompts_are_sent_beside_the_turns_and_not_counted_among_them() -> None:
    class Waiting(Server):
        """Answers a session's turn once a one-shot prompt, which is shorter, was answered."""

        has_answered = asyncio.Event()

        async def send(self, call: Call) -> Sample:
            sample = await super().send(call)
            if sample.prompt_tokens > 6:
                await self.has_answered.wait()
            self.has_answered.set()
            return sample

    measured = await run(Waiting(), load(turns=4, shots=OneShots(rate=1000, length=6)))
    rows = {row.key: row.value for section in measured.sections for row in section.rows}
    assert rows["turns"] == 4
    assert len(measured.samples) > 4
    assert rows["median_ttft_one_shots_ms"] == pytest.approx(100)


def turn(session: int, number: int, before: int, prompt: int, cached: int, **fields: float | str) -> SessionSample:
    sample = Sample(0.0, prompt_tokens=prompt, cached_tokens=cached, **fields)  # type: ignore[arg-type]
    return SessionSample(session, number, before, sample)


def test_what_was_cached_stands_beside_what_could_be() -> None:
    turns = [
        turn(1, 0, 20, 100, 0, ttft=4.0),
        turn(2, 0, 20, 100, 20, ttft=2.0),
        turn(1, 1, 100, 200, 90, ttft=1.0),
        turn(2, 1, 100, 100, 0, error="HTTP 500"),
    ]
    sections = session_sections(turns, [], 30.0)
    rows = {row.key: row.value for section in sections for row in section.rows}
    assert (rows["sessions"], rows["turns"], rows["turns_per_minute"]) == (2, 3, 6)
    assert rows["cached_share"] == pytest.approx(110 / 400)
    assert rows["ideal_cached_share"] == pytest.approx(140 / 400)
    assert rows["cached_of_ideal"] == pytest.approx(110 / 140)
    assert (rows["median_ttft_first_turns_ms"], rows["max_ttft_first_turns_ms"]) == pytest.approx((3000, 4000))
    assert rows["median_ttft_later_turns_ms"] == pytest.approx(1000)
    assert len(sections) == 3


def test_a_chat_has_the_parts_as_messages_and_a_completion_as_one_text() -> None:
    parts = ["question", "answer", "result"]
    chat = Requests(ServerOptions(backend="openai-chat"), {}, ignores_eos=True).make("m", parts, 4, None)
    assert [each["role"] for each in orjson.loads(chat.body)["messages"]] == ["user", "assistant", "user"]
    text = Requests(ServerOptions(), {}, ignores_eos=True).make("m", parts, 4, None)
    assert orjson.loads(text.body)["prompt"] == "questionanswerresult"


@pytest.mark.parametrize(
    ("text", "distribution"),
    [
        ("7", Evenly(7, 7)),
        ("0.1:1", Evenly(0.1, 1)),
        ("lognormal:35:0.6", LogNormal(35, 0.6)),
        ("agents", Agents()),
    ],
)
def test_a_distribution_is_written_as_it_is_read(text: str, distribution: Evenly | LogNormal | Agents) -> None:
    assert parse_distribution(text) == distribution
    assert str(distribution) == text


@pytest.mark.parametrize("text", ["", "x", "2:1", "-1", "1:2:3", "lognormal:0:1", "lognormal:5", "nan", "inf"])
def test_what_is_no_distribution_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # the sentence differs
        parse_distribution(text)


@pytest.mark.parametrize("text", ["", "1", "0:5", "2:5", "0.1:0", "0.1:x"])
def test_what_is_no_share_with_a_number_of_turns_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not SHARE:TURNS"):
        parse_subagents(text)


@pytest.mark.parametrize("text", ["", "4", "0:5", "4:0", "4:x", "inf:5"])
def test_what_is_no_rate_with_a_length_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not RATE:TOKENS"):
        parse_one_shots(text)


def test_plans_have_the_medians_of_the_flags() -> None:
    draw = np.random.default_rng(1)
    plans = [SessionOptions().workload.plan(draw, 10_000) for _ in range(200)]
    assert 30 < np.median([len(turns) for turns in plans]) < 40
    assert 1200 < np.median([turn.new_tokens for turns in plans for turn in turns[1:]]) < 1500
    assert np.mean([turn.gap < 1 for turns in plans for turn in turns]) == pytest.approx(0.86, abs=0.02)
