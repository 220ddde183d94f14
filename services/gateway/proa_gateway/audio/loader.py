"""AudioLoader: the windows of a request's audio file, decoded while the request reads them."""

import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, Protocol

from proa.contract.audio import SAMPLE_BYTES
from proa_gateway.audio.config import AudioOptions
from proa_gateway.audio.memory import AudioMemory, HeldSamples
from proa_gateway.audio.pipe import DecodeRequest
from proa_gateway.audio.processes import (
    PROCESS_BYTES,
    AudioProcess,
    AudioProcesses,
    AudioProcessFailed,
    AudioProgramFailed,
    AudioRefused,
    Window,
)
from proa_gateway.errors import InternalError, InvalidRequest, Overloaded, UnsupportedTask

Outcome = Literal["prepared", "cached", "refused", "overloaded", "cancelled"]
WindowOutcome = Literal["accepted", "retried", "silent"]
EXTRA = ("av", "soxr")  # what the extra `audio` installs
_INVALID = "Invalid or unsupported audio file"
_log = logging.getLogger(__name__)


class Metrics(Protocol):
    def observe_audio(self, outcome: Outcome, decode_seconds: float, audio_seconds: float) -> None: ...

    def observe_audio_process_failure(self) -> None: ...

    def observe_window(self, outcome: WindowOutcome) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioFile:
    data: list[bytearray]  # its content, in parts, until a process has it
    param: str  # the field that errors name
    sampling_rate: int  # of its windows
    max_window: int  # samples of a window
    max_samples: int  # of all windows
    num_uncounted: int = 0  # bytes of the content that nothing else counts while the process has them


class AudioLoader:
    """Decodes the files of all requests. `memory`: in which requests hold samples."""

    def __init__(self, options: AudioOptions, memory: AudioMemory, metrics: Metrics) -> None:
        self.options = options
        self.metrics = metrics
        self.memory = memory
        self._is_installed = all(map(find_spec, EXTRA))  # once: it reads folders
        self._processes = AudioProcesses(
            options.audio_processes, options.process_memory, metrics.observe_audio_process_failure
        )

    async def windows(self, file: AudioFile, held: HeldSamples) -> AsyncGenerator[Window]:
        """Yield the file's windows in order, each of which counts in `held` as the bytes of its samples. The process
        has ended when the last one is yielded. Raises `InvalidRequest` for a file that cannot be used, `Overloaded`,
        and `UnsupportedTask` if the gateway lacks the extra."""
        if not self._is_installed:
            message = (
                "This gateway reads no audio files, its extra is not installed: pip install 'proa-gateway[audio]'."
            )
            raise UnsupportedTask(message, param=file.param)
        timeout, most = self.options.audio_decode_timeout, SAMPLE_BYTES * file.max_window
        decoding = _Decoding(file, timeout)
        outcome: Outcome = "cancelled"
        try:
            async with (
                held.decoding(PROCESS_BYTES + file.num_uncounted, most, timeout),
                self._processes.process() as process,
            ):
                while True:
                    await held.take(most)
                    async with self._processes.turn(timeout):
                        window = await decoding.next_window(process)
                    held.release(most - len(window.samples))
                    if window.is_last:
                        break
                    yield window
            outcome = "prepared"
        except AudioRefused as error:
            outcome = "refused"
            raise InvalidRequest(f"{_INVALID}: {error}.", param=file.param) from error
        except AudioProgramFailed as error:
            _log.error("no process that decodes audio could be started: %s", error)
            raise InternalError("The gateway could not start a process that decodes audio.") from error
        except AudioProcessFailed as error:
            outcome = "refused"
            _log.warning("an audio process failed on a file of %d bytes: %s", decoding.request.num_bytes, error)
            raise InvalidRequest(f"{_INVALID}: it could not be decoded in time.", param=file.param) from error
        except Overloaded:
            outcome = "overloaded"
            raise
        finally:
            self.metrics.observe_audio(outcome, decoding.decode_seconds, decoding.seconds)
        yield window

    async def close(self) -> None:
        """End the processes. No file is being read any more."""
        await self._processes.close()


class _Decoding:
    """A file that is decoded. `seconds`: of its audio, so far; `decode_seconds`: that decoding it took."""

    def __init__(self, file: AudioFile, timeout: float) -> None:
        self._file = file
        self._timeout = timeout
        self._is_sent = False
        self.seconds = self.decode_seconds = 0.0
        self.request = DecodeRequest(
            num_bytes=sum(map(len, file.data)),
            sampling_rate=file.sampling_rate,
            max_window=file.max_window,
            max_samples=file.max_samples,
            cpu_seconds=round(timeout + file.max_samples / file.sampling_rate / 60) + 10,
        )

    async def next_window(self, process: AudioProcess) -> Window:
        """Raises `AudioRefused` and `AudioProcessFailed`."""
        started = time.perf_counter()
        try:
            if not self._is_sent:
                self._is_sent = True
                await process.send_file(self._file.data, self.request, self._time_left)
            window = await process.next_window(self._file.max_window, self._time_left)
        finally:
            self.decode_seconds += time.perf_counter() - started
        self.seconds += window.num_samples / self._file.sampling_rate
        return window

    @property
    def _time_left(self) -> float:
        return max(0.0, self._timeout + self.seconds / 60 - self.decode_seconds)
