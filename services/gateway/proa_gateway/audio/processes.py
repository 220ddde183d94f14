"""AudioProcesses: the processes that decode audio files. One that dies, is late or breaks the rules is replaced."""

import asyncio
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

from proa_gateway.audio.pipe import HEAD_SIZE, MAX_TEXT, Command, DecodeRequest, Kind, unpack_head

START_SECONDS: Final = 60.0  # for a process to start; it takes one, on a busy machine more
# All that a process gets of the gateway's environment, which may have API keys.
_VARIABLES: Final = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")
_log = logging.getLogger(__name__)


class AudioRefused(Exception):
    """The file cannot be used. The message is for the client."""


class AudioProcessFailed(Exception):
    """The process died, was late or sent what it must not. The message is for the log."""


class AudioProcessesBusy(Exception):
    """No process became free in time."""


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a file's audio. `samples`: float32 in little-endian order; empty if there is no sound."""

    num_samples: int
    samples: bytes


class AudioProcess:
    """One process. `is_usable`: false from the beginning of each exchange to its end, and for good if that fails."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._input, self._output = process.stdin, process.stdout
        self._has_file = False
        self.is_usable = False

    @classmethod
    async def start(cls, max_memory: int) -> "AudioProcess":
        """`max_memory`: bytes of address space. Raises `AudioProcessFailed`."""
        variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "proa_gateway.audio.child", str(max_memory)),
            stdin=PIPE,
            stdout=PIPE,
            env=variables | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # not ended by the terminal's Ctrl-C, before the gateway has drained
        )
        started = cls(process)
        try:
            kind, _ = await started._reply(START_SECONDS, 0)
            if kind is not Kind.READY:
                raise AudioProcessFailed(f"it sent {kind.name} when it started")
        except BaseException:
            await started.kill()
            raise
        started.is_usable = True
        return started

    async def send_file(self, data: Sequence[bytes | bytearray], request: DecodeRequest, seconds: float) -> None:
        """Raises `AudioProcessFailed`."""
        self._has_file, self.is_usable = True, False
        try:
            async with asyncio.timeout(seconds):
                self._input.write(Command.FILE.value + request.pack())
                for part in data:
                    self._input.write(part)
                    await self._input.drain()
        except TimeoutError:
            raise AudioProcessFailed(f"it did not read the file in {seconds:.1f} s") from None
        except ConnectionError:
            raise AudioProcessFailed(self._end()) from None
        self.is_usable = True

    async def next_window(self, max_samples: int, seconds: float) -> Window | None:
        """The file's next window; None: there is no other one. Raises `AudioRefused` and `AudioProcessFailed`."""
        self.is_usable = False
        self._input.write(Command.NEXT.value)
        kind, payload = await self._reply(seconds, max(MAX_TEXT, 4 * max_samples))
        self._has_file = kind in (Kind.WINDOW, Kind.SILENCE)
        self.is_usable = kind is not Kind.EXHAUSTED
        match kind:
            case Kind.WINDOW:
                return Window(len(payload) // 4, payload)
            case Kind.SILENCE:
                return Window(int.from_bytes(payload, "little"), b"")
            case Kind.END:
                return None
            case Kind.REFUSED:
                raise AudioRefused(payload.decode(errors="replace"))
            case Kind.EXHAUSTED:
                raise AudioRefused("decoding it takes too much memory")
            case Kind.READY:
                self.is_usable = False
                raise AudioProcessFailed("it sent READY for a window")

    def close_file(self) -> None:
        if self._has_file:
            self._input.write(Command.CLOSE.value)
            self._has_file = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    async def kill(self) -> None:
        self.is_usable = False
        with suppress(ProcessLookupError):
            self._process.kill()
        self._input.close()
        await self._process.wait()

    async def _reply(self, seconds: float, max_bytes: int) -> tuple[Kind, bytes]:
        try:
            async with asyncio.timeout(seconds):
                kind, size = unpack_head(await self._output.readexactly(HEAD_SIZE))
                if size > max_bytes:
                    raise AudioProcessFailed(f"it sent {size} bytes, at most {max_bytes} were expected")
                return kind, await self._output.readexactly(size)
        except TimeoutError:
            raise AudioProcessFailed(f"it did not reply in {seconds:.1f} s") from None
        except ValueError as error:
            raise AudioProcessFailed(f"its reply cannot be read: {error}") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise AudioProcessFailed(self._end()) from None

    def _end(self) -> str:
        return f"it ended with status {self._process.returncode}"  # None: the event loop has not been notified yet


class AudioProcesses:
    """Starts processes when they are needed, and keeps them. `on_replace` is called for each that had to be ended."""

    def __init__(self, count: int, max_memory: int, on_replace: Callable[[], None]) -> None:
        self._max_memory = max_memory
        self._on_replace = on_replace
        self._free = asyncio.Semaphore(count)
        self._idle: list[AudioProcess] = []  # the one that was used last is the last

    @asynccontextmanager
    async def process(self, seconds: float) -> AsyncIterator[AudioProcess]:
        """A process that nobody else uses. Raises `AudioProcessesBusy` after `seconds`, and
        `AudioProcessFailed` if none can be started."""
        try:
            async with asyncio.timeout(seconds):
                await self._free.acquire()
        except TimeoutError:
            raise AudioProcessesBusy from None
        process: AudioProcess | None = None
        try:
            process = self._take_idle() or await AudioProcess.start(self._max_memory)
            yield process
        finally:
            try:
                if process is not None:
                    await self._put_back(process)
            finally:
                self._free.release()

    async def close(self) -> None:
        """End the processes. No file is being decoded any more."""
        while self._idle:
            await self._idle.pop().kill()

    def _take_idle(self) -> AudioProcess | None:
        while self._idle:
            process = self._idle.pop()
            if process.is_running:
                return process
            _log.warning("an idle audio process ended and is replaced")
            self._on_replace()
        return None

    async def _put_back(self, process: AudioProcess) -> None:
        if process.is_usable:
            process.close_file()
            self._idle.append(process)
            return
        self._on_replace()
        await asyncio.shield(process.kill())
