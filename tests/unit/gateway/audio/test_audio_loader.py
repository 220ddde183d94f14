"""Audio files of requests, decoded by real processes: of those that die, hang or take too much only the request whose
file they had fails."""

import asyncio
import os
import resource
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proa_gateway.audio import loader as loader_module
from proa_gateway.audio.config import DECODING_BYTES, AudioOptions
from proa_gateway.audio.loader import AudioFile, AudioLoader
from proa_gateway.audio.memory import AudioMemory
from proa_gateway.audio.processes import AudioProcesses, AudioProcessFailed, Window
from proa_gateway.errors import GatewayError, InternalError, InvalidRequest, Overloaded, UnsupportedTask
from support.audio_files import encode, tone
from support.gateway import until

RATE = 16_000
TONE = encode(tone(0.5, RATE), RATE)
SHORT_WINDOWS = encode(tone(2, RATE), RATE)
"""A file that is read in windows of half a second at most."""


@dataclass
class FakeMetrics:
    audios: list[tuple[str, float]] = field(default_factory=list)  # outcome, seconds of audio
    failures: int = 0

    def observe_audio(self, outcome: str, decode_seconds: float, audio_seconds: float) -> None:
        assert decode_seconds >= 0
        self.audios.append((outcome, round(audio_seconds, 2)))

    def observe_window(self, outcome: str) -> None: ...

    def observe_audio_process_failure(self) -> None:
        self.failures += 1


class Loading:
    """A loader and what tests look at. Windows are counted in `memory` until the file's end."""

    def __init__(self, options: AudioOptions) -> None:
        self.metrics = FakeMetrics()
        self.memory = AudioMemory(options.max_audio_memory)
        self.loader = AudioLoader(options, self.memory, self.metrics)

    @asynccontextmanager
    async def windows(self, data: bytes, *, max_window: int = 30 * RATE) -> AsyncIterator[AsyncIterator[Window]]:
        file = AudioFile(
            data=[bytearray(data)],
            param="file",
            sampling_rate=RATE,
            max_window=max_window,
            max_samples=7200 * RATE,
        )
        with self.memory.request() as held:
            async with aclosing(self.loader.windows(file, held)) as windows:
                yield windows

    async def read(self, data: bytes, *, max_window: int = 30 * RATE) -> list[int]:
        """The windows' numbers of samples."""
        async with self.windows(data, max_window=max_window) as windows:
            return [window.num_samples async for window in windows]

    async def error(self, data: bytes) -> GatewayError:
        with pytest.raises(GatewayError) as caught:
            await self.read(data)
        return caught.value


@asynccontextmanager
async def loading(**options: Any) -> AsyncIterator[Loading]:
    loading = Loading(AudioOptions(**options))
    try:
        yield loading
    finally:
        await loading.loader.close()
    assert loading.memory.num_bytes == 0


async def test_a_files_windows_have_its_samples_and_silence_has_none() -> None:
    samples = np.concatenate([tone(1, RATE), np.zeros(3 * RATE, np.float32), tone(1, RATE)])
    async with loading() as each, each.windows(encode(samples, RATE, "wav of floats"), max_window=RATE) as windows:
        found = [window async for window in windows]
        assert each.memory.num_bytes == sum(len(window.samples) for window in found)
    assert sum(window.num_samples for window in found) == 5 * RATE
    assert [window.is_last for window in found] == [False] * (len(found) - 1) + [True]
    assert any(not window.samples for window in found)
    assert found[0].samples == samples[: found[0].num_samples].tobytes()
    assert each.metrics.audios == [("prepared", 5.0)]


async def test_each_file_has_a_process_of_its_own_until_its_last_window() -> None:
    async with loading() as each:
        async with each.windows(SHORT_WINDOWS, max_window=RATE // 2) as windows:
            await anext(windows)
            (first,) = processes()
            error = await each.error(b"hello")
            assert isinstance(error, InvalidRequest)
            assert error.param == "file"
            assert error.message.startswith("Invalid or unsupported audio file: the formats are WAV,")
            async with each.windows(TONE) as others:
                assert (await anext(others)).is_last
                await until(lambda: processes() == [first])
        await until(lambda: not processes())
        assert len(programs()) == 1
    assert each.metrics.failures == 0
    assert [outcome for outcome, _ in each.metrics.audios] == ["refused", "prepared", "cancelled"]


async def test_a_short_file_does_not_wait_for_long_ones_whose_windows_are_not_read() -> None:
    async with loading(audio_processes=1) as each, AsyncExitStack() as stack:
        for _ in range(3):
            windows = await stack.enter_async_context(each.windows(SHORT_WINDOWS, max_window=RATE // 2))
            await anext(windows)
        assert await each.read(TONE) == [RATE // 2]


async def test_a_process_gets_no_keys_and_may_open_nothing() -> None:
    os.environ["PROA_API_KEY"] = "secret"
    try:
        async with loading(max_audio_bytes=1000) as each, each.windows(SHORT_WINDOWS, max_window=RATE) as windows:
            await anext(windows)
            (pid,) = processes()
            assert b"secret" not in _read(pid, "environ")
            assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (3, 3)
            assert resource.prlimit(pid, resource.RLIMIT_AS)[0] == AudioOptions(max_audio_bytes=1000).process_memory
            assert len(os.listdir(f"/proc/{pid}/fd")) == 3
    finally:
        del os.environ["PROA_API_KEY"]


async def test_a_killed_process_fails_its_file_only() -> None:
    async with loading() as each:
        async with each.windows(SHORT_WINDOWS, max_window=RATE // 2) as windows:
            await anext(windows)
            os.kill(processes()[0], signal.SIGKILL)
            with pytest.raises(InvalidRequest, match="it could not be decoded"):
                await anext(windows)
        assert await each.read(TONE) == [RATE // 2]
    assert each.metrics.failures == 1


async def test_a_program_that_died_is_replaced_and_fails_no_file() -> None:
    async with loading() as each, each.windows(SHORT_WINDOWS, max_window=RATE // 2) as windows:
        await anext(windows)
        (program,) = programs()
        os.kill(program, signal.SIGKILL)
        await until(lambda: not programs())
        assert await each.read(TONE) == [RATE // 2]
        await anext(windows)
    assert each.metrics.failures == 1


async def test_a_process_that_hangs_is_ended_when_the_time_for_its_file_is_over() -> None:
    all_processes = AudioProcesses(1, AudioOptions().process_memory, lambda: None)
    async with all_processes.process() as process:
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(AudioProcessFailed, match=r"it did not reply in 0\.1 s"):
            await process.next_window(RATE, 0.1)
    await until(lambda: not processes())
    await all_processes.close()


async def test_a_file_that_takes_too_much_memory_is_refused() -> None:
    async with loading(max_audio_bytes=1) as each:
        error = await each.error(bytes(300 * 2**20))
        assert error.status == 400
        assert await each.read(TONE) == [RATE // 2]


async def test_files_wait_for_a_turn_and_fail_if_none_comes_in_time() -> None:
    async with loading(audio_processes=1) as each, each.windows(SHORT_WINDOWS, max_window=RATE // 2) as windows:
        await anext(windows)
        os.kill(processes()[0], signal.SIGSTOP)
        decoding = asyncio.ensure_future(anext(windows))
        await asyncio.sleep(0)
        each.loader.options = AudioOptions(audio_decode_timeout=0.05)
        error = await each.error(TONE)
        assert isinstance(error, Overloaded)
        assert error.message == "The server is at its limit of audio files that are decoded at the same time."
        os.kill(processes()[0], signal.SIGCONT)
        await decoding
    assert [outcome for outcome, _ in each.metrics.audios] == ["overloaded", "cancelled"]


async def test_a_file_waits_until_there_is_memory_for_a_process_and_a_window() -> None:
    async with loading(max_audio_memory=DECODING_BYTES + 1, max_audio_bytes=1) as each:
        async with each.windows(SHORT_WINDOWS, max_window=RATE // 2) as windows:
            await anext(windows)
            waiting = asyncio.create_task(each.read(TONE))
            for _ in range(10):
                await asyncio.sleep(0)
            assert not waiting.done()
        assert await waiting == [RATE // 2]


async def test_windows_beside_unfinished_ones_leave_a_quarter_of_the_memory_to_files_that_arrive() -> None:
    part, memory = DECODING_BYTES, AudioMemory(8 * DECODING_BYTES)
    with memory.request() as held:
        async with held.decoding(part, part, 1):
            for _ in range(5):
                await held.take(part)
            last = asyncio.create_task(held.take(part))
            for _ in range(5):
                await asyncio.sleep(0)
            memory.hold(part)
            held.release(part)
            assert not last.done()
            with pytest.raises(Overloaded):
                memory.hold(part + 1)
            memory.release(part)
            await last
        assert memory.num_bytes == held.num_bytes == 5 * part
    assert memory.num_bytes == 0


async def test_one_file_is_decoded_however_many_arrive() -> None:
    memory = AudioMemory(2 * DECODING_BYTES)
    memory.hold(DECODING_BYTES)
    with memory.request() as first, memory.request() as second:
        async with first.decoding(DECODING_BYTES, 0, 1):
            with pytest.raises(Overloaded):
                async with second.decoding(1, 0, 0.01):
                    pass
        async with second.decoding(DECODING_BYTES, 0, 1):
            assert memory.num_bytes == 2 * DECODING_BYTES


async def test_a_request_that_is_cancelled_while_its_file_is_decoded_ends_the_process() -> None:
    async with loading() as each:
        async with each.windows(SHORT_WINDOWS, max_window=RATE // 2) as windows:
            await anext(windows)
            os.kill(processes()[0], signal.SIGSTOP)
            cancelled = asyncio.ensure_future(anext(windows))
            await asyncio.sleep(0)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            await until(lambda: not processes())
        assert await each.read(TONE) == [RATE // 2]
    assert each.metrics.audios[0][0] == "cancelled"


async def test_a_gateway_without_the_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "EXTRA", ("no_such_module",))
    async with loading() as each:
        error = await each.error(TONE)
        assert isinstance(error, UnsupportedTask)
        assert "pip install 'proa-gateway[audio]'" in error.message


async def test_a_process_that_cannot_start_is_the_gateways_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    async with loading() as each:
        assert isinstance(await each.error(TONE), InternalError)


def test_the_memory_of_requests_has_room_for_a_file() -> None:
    with pytest.raises(ValueError, match="--max-audio-memory must be larger than --max-audio-bytes"):
        AudioOptions(max_audio_bytes=100, max_audio_memory=99)


def programs() -> list[int]:
    """The running programs that fork processes for files."""
    return [pid for pid in _children(os.getpid()) if b"proa_gateway.audio.child" in _read(pid, "cmdline")]


def processes() -> list[int]:
    """The running processes for files."""
    return [pid for program in programs() for pid in _children(program) if _read(pid, "cmdline")]


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(each) for task in tasks for each in (task / "children").read_text().split()]


def _read(pid: int, name: str) -> bytes:
    """Empty for a process that has ended."""
    return Path(f"/proc/{pid}/{name}").read_bytes()
