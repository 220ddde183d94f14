"""Audio files of requests, decoded by real processes: those that die, hang or take too much are replaced, and only the
request whose file they had fails."""

import asyncio
import os
import resource
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proa_gateway.audio import loader as loader_module
from proa_gateway.audio.config import AudioOptions
from proa_gateway.audio.loader import AudioFile, AudioLoader, AudioWindows
from proa_gateway.audio.memory import AudioMemory
from proa_gateway.audio.processes import AudioProcess
from proa_gateway.errors import GatewayError, InternalError, InvalidRequest, Overloaded, UnsupportedTask
from support.audio_files import encode, tone
from support.gateway import until

RATE = 16_000
TONE = encode(tone(0.5, RATE), RATE)


@dataclass
class FakeMetrics:
    audios: list[tuple[str, float]] = field(default_factory=list)  # outcome, seconds of audio
    restarts: int = 0

    def observe_audio(self, outcome: str, decode_seconds: float, audio_seconds: float) -> None:
        assert decode_seconds >= 0
        self.audios.append((outcome, round(audio_seconds, 2)))

    def observe_window(self, outcome: str) -> None: ...

    def observe_audio_process_restart(self) -> None:
        self.restarts += 1


class Loading:
    """A loader and what tests look at. `processes`: in the order of their use."""

    def __init__(self, options: AudioOptions) -> None:
        self.metrics = FakeMetrics()
        self.memory = AudioMemory(options.max_audio_memory)
        self.loader = AudioLoader(options, self.memory, self.metrics)
        self.processes: list[AudioProcess] = []

    @asynccontextmanager
    async def windows(self, data: bytes, *, max_window: int = 30 * RATE) -> AsyncIterator[AudioWindows]:
        file = AudioFile(data=[data], param="file", sampling_rate=RATE, max_window=max_window)
        with self.memory.request() as held:
            async with self.loader.windows(file, held) as windows:
                self.processes.append(windows.process)
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
    loading = Loading(AudioOptions(**{"audio_processes": 1} | options))
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
    assert any(not window.samples for window in found)
    assert found[0].samples == samples[: found[0].num_samples].tobytes()
    assert each.metrics.audios == [("prepared", 5.0)]


async def test_a_process_decodes_file_after_file_also_behind_refused_ones() -> None:
    async with loading() as each:
        assert await each.read(TONE) == [RATE // 2]
        error = await each.error(b"hello")
        assert isinstance(error, InvalidRequest)
        assert error.param == "file"
        assert error.message.startswith("Invalid or unsupported audio file: the formats are WAV,")
        async with each.windows(encode(tone(2, RATE), RATE), max_window=RATE // 2) as windows:
            await anext(windows)  # the rest is not read
        assert await each.read(TONE) == [RATE // 2]
        assert len(set(each.processes)) == 1
    assert each.metrics.restarts == 0
    assert [outcome for outcome, _ in each.metrics.audios] == ["prepared", "refused", "cancelled", "prepared"]


async def test_a_process_gets_no_keys_and_may_open_nothing() -> None:
    os.environ["PROA_API_KEY"] = "secret"
    try:
        async with loading(max_audio_bytes=1000) as each:
            await each.read(TONE)
            pid = each.processes[0].pid
            assert b"secret" not in _environment(pid)
            assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (3, 3)
            assert resource.prlimit(pid, resource.RLIMIT_AS)[0] == AudioOptions(max_audio_bytes=1000).process_memory
            assert len(os.listdir(f"/proc/{pid}/fd")) == 3
    finally:
        del os.environ["PROA_API_KEY"]


async def test_a_killed_process_fails_its_file_only() -> None:
    async with loading() as each:
        async with each.windows(encode(tone(2, RATE), RATE), max_window=RATE // 2) as windows:
            await anext(windows)
            os.kill(windows.process.pid, signal.SIGKILL)
            with pytest.raises(InvalidRequest, match="it could not be decoded"):
                await anext(windows)
        assert await each.read(TONE) == [RATE // 2]
        assert len(set(each.processes)) == 2
    assert each.metrics.restarts == 1


async def test_an_idle_process_that_died_is_replaced_and_fails_no_file() -> None:
    async with loading() as each:
        await each.read(TONE)
        os.kill(each.processes[0].pid, signal.SIGKILL)
        await until(lambda: not each.processes[0].is_running)
        assert await each.read(TONE) == [RATE // 2]
    assert each.metrics.restarts == 1


async def test_a_process_that_hangs_is_ended_when_the_time_for_its_file_is_over() -> None:
    async with loading() as each:
        await each.read(TONE)
        os.kill(each.processes[0].pid, signal.SIGSTOP)
        each.loader.options = AudioOptions(audio_processes=1, audio_decode_timeout=0.05)
        error = await each.error(TONE)
        assert error.message == "Invalid or unsupported audio file: it could not be decoded in time."
        assert not each.processes[0].is_running
        each.loader.options = AudioOptions(audio_processes=1)
        assert await each.read(TONE) == [RATE // 2]


async def test_a_file_that_takes_too_much_memory_is_refused() -> None:
    async with loading(max_audio_bytes=1) as each:
        error = await each.error(bytes(400 * 2**20))
        assert error.status == 400
        assert await each.read(TONE) == [RATE // 2]


async def test_files_wait_for_a_process_and_fail_if_none_becomes_free_in_time() -> None:
    async with loading(audio_decode_timeout=0.05) as each:
        each.loader.options = AudioOptions(audio_processes=1)
        async with each.windows(TONE) as windows:
            await anext(windows)
            each.loader.options = AudioOptions(audio_processes=1, audio_decode_timeout=0.05)
            assert isinstance(await each.error(TONE), Overloaded)
    assert [outcome for outcome, _ in each.metrics.audios] == ["overloaded", "cancelled"]


async def test_windows_wait_for_memory_until_others_are_released() -> None:
    async with loading(max_audio_memory=4 * RATE * 2, max_audio_bytes=1) as each:
        file = encode(tone(3, RATE), RATE)
        async with each.windows(file, max_window=RATE) as windows:
            found = [await anext(windows)]
            waiting = asyncio.create_task(windows.__anext__())
            found.append(await waiting)
            blocked = asyncio.create_task(windows.__anext__())
            for _ in range(10):
                await asyncio.sleep(0)
            assert not blocked.done()
            windows.held.release(len(found[0].samples))
            found.append(await blocked)
    assert sum(window.num_samples for window in found) <= 3 * RATE


async def test_a_request_that_is_cancelled_while_its_file_is_decoded_leaves_a_process_for_others() -> None:
    async with loading() as each:
        await each.read(TONE)
        os.kill(each.processes[0].pid, signal.SIGSTOP)
        cancelled = asyncio.create_task(each.read(TONE))
        await until(lambda: len(each.processes) == 2)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert await each.read(TONE) == [RATE // 2]
    assert each.metrics.audios[1] == ("cancelled", 0.0)


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
    with pytest.raises(ValueError, match="--max-audio-memory must be at least --max-audio-bytes"):
        AudioOptions(max_audio_bytes=100, max_audio_memory=99)


def _environment(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()
