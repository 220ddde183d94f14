"""AudioLoader: the windows of a request's audio file, decoded while the request reads them."""

import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, Protocol

from proa.contract.audio import SAMPLE_BYTES
from proa_gateway.audio.config import AudioOptions
from proa_gateway.audio.memory import AudioMemory, HeldSamples
from proa_gateway.audio.pipe import DecodeRequest
from proa_gateway.audio.processes import (
    AudioProcess,
    AudioProcesses,
    AudioProcessesBusy,
    AudioProcessFailed,
    AudioRefused,
    Window,
)
from proa_gateway.errors import GatewayError, InternalError, InvalidRequest, Overloaded, UnsupportedTask

Outcome = Literal["prepared", "refused", "overloaded", "cancelled"]
WindowOutcome = Literal["accepted", "retried", "silent"]
EXTRA = ("av", "soxr")  # what the extra `audio` installs
_log = logging.getLogger(__name__)


class Metrics(Protocol):
    def observe_audio(self, outcome: Outcome, decode_seconds: float, audio_seconds: float) -> None: ...

    def observe_audio_process_restart(self) -> None: ...

    def observe_window(self, outcome: WindowOutcome) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioFile:
    data: Sequence[bytes | bytearray]  # its content, in parts
    param: str  # the field that errors name
    sampling_rate: int  # of its windows
    max_window: int  # samples of a window

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.data))


class AudioWindows:
    """The windows of one file, in order. Each counts in `held` as the bytes of its samples.

    `seconds`: of the file's audio, so far; `decode_seconds`: that decoding it took.
    """

    def __init__(self, file: AudioFile, options: AudioOptions, process: AudioProcess, held: HeldSamples) -> None:
        self._file = file
        self._timeout = options.audio_decode_timeout
        self._max_seconds = options.max_audio_seconds
        self.process = process
        self._is_sent = False
        self.held = held
        self.seconds = self.decode_seconds = 0.0
        self.outcome: Outcome = "cancelled"

    def __aiter__(self) -> AsyncIterator[Window]:
        return self

    async def __anext__(self) -> Window:
        """Raises `InvalidRequest` for a file that cannot be used, and `Overloaded`."""
        file = self._file
        most = SAMPLE_BYTES * file.max_window
        try:
            await self.held.wait_and_hold(most, self._timeout)
            window = await self._decode()
        except GatewayError as error:
            self.outcome = "overloaded" if isinstance(error, Overloaded) else "refused"
            raise
        self.held.release(most - (0 if window is None else len(window.samples)))
        if window is None:
            self.outcome = "prepared"
            raise StopAsyncIteration
        self.seconds += window.num_samples / file.sampling_rate
        return window

    async def _decode(self) -> Window | None:
        file, started = self._file, time.perf_counter()
        message = "Invalid or unsupported audio file: "
        try:
            if not self._is_sent:
                self._is_sent = True
                await self.process.send_file(file.data, self._request(), self._time_left)
            return await self.process.next_window(file.max_window, self._time_left)
        except AudioRefused as error:
            raise InvalidRequest(f"{message}{error}.", param=file.param) from error
        except AudioProcessFailed as error:
            _log.warning("audio process %d failed on a file of %d bytes: %s", self.process.pid, file.num_bytes, error)
            raise InvalidRequest(f"{message}it could not be decoded in time.", param=file.param) from error
        finally:
            self.decode_seconds += time.perf_counter() - started

    @property
    def _time_left(self) -> float:
        return max(0.0, self._timeout + self.seconds / 60 - self.decode_seconds)

    def _request(self) -> DecodeRequest:
        return DecodeRequest(
            num_bytes=self._file.num_bytes,
            sampling_rate=self._file.sampling_rate,
            max_window=self._file.max_window,
            max_seconds=self._max_seconds,
            cpu_seconds=round(self._timeout + self._max_seconds / 60) + 10,
        )


class AudioLoader:
    """Decodes the files of all requests. `memory`: in which requests hold samples."""

    def __init__(self, options: AudioOptions, memory: AudioMemory, metrics: Metrics) -> None:
        self.options = options
        self.metrics = metrics
        self._processes = AudioProcesses(
            options.audio_processes, options.process_memory, metrics.observe_audio_process_restart
        )
        self.memory = memory

    @asynccontextmanager
    async def windows(self, file: AudioFile, held: HeldSamples) -> AsyncIterator[AudioWindows]:
        """The file's windows, in a process that is kept until the context ends. Raises `Overloaded`, and
        `UnsupportedTask` if the gateway lacks the extra."""
        if not all(map(find_spec, EXTRA)):
            message = (
                "This gateway reads no audio files, its extra is not installed: pip install 'proa-gateway[audio]'."
            )
            raise UnsupportedTask(message, param=file.param)
        try:
            async with self._processes.process(self.options.audio_decode_timeout) as process:
                windows = AudioWindows(file, self.options, process, held)
                try:
                    yield windows
                finally:
                    self.metrics.observe_audio(windows.outcome, windows.decode_seconds, windows.seconds)
        except AudioProcessesBusy:
            self.metrics.observe_audio("overloaded", 0.0, 0.0)
            message = "The server is at its limit of audio files that are decoded at the same time."
            raise Overloaded(message, limit="audios") from None
        except AudioProcessFailed as error:
            _log.error("no audio process could be started: %s", error)
            raise InternalError("The gateway could not start a process that decodes audio.") from error

    async def close(self) -> None:
        """End the processes. No file is being read any more."""
        await self._processes.close()
