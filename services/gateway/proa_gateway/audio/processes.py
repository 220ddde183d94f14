"""AudioProcesses: a process for each audio file that is decoded, forked by one program (`child.py`)."""

import asyncio
import logging
import os
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

from proa_gateway.audio.pipe import (
    HEAD_SIZE,
    MAX_TEXT,
    NEXT,
    NUMBER_SIZE,
    Control,
    DecodeRequest,
    Head,
    Kind,
    pack_control,
    unpack_number,
)
from proa_gateway.errors import Overloaded

PROCESS_BYTES: Final = 16 * 1024 * 1024
"""Memory of a process that the program does not share, without its file: 8 to 12 MB with any codec."""
START_SECONDS: Final = 60.0  # for the program to start; it takes one, on a busy machine more
# All that the program gets of the gateway's environment, which may have API keys.
_VARIABLES: Final = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")
_log = logging.getLogger(__name__)


class AudioRefused(Exception):
    """The file cannot be used. The message is for the client."""


class AudioProcessFailed(Exception):
    """The process died, was late or sent what it must not. The message is for the log."""


class AudioProgramFailed(AudioProcessFailed):
    """The program could not start, or could not fork a process."""


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a file's audio. `samples`: float32 in little-endian order; empty if there is no sound."""

    num_samples: int
    samples: bytes
    is_last: bool


class AudioProcess:
    """A process for one file. Its methods raise `AudioProcessFailed`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        writer.transport.set_write_buffer_limits(0)  # a file's parts are not kept
        self.pid = 0

    async def wait_for_start(self) -> None:
        head, payload = await self._reply(START_SECONDS, NUMBER_SIZE)
        if head.kind is not Kind.READY:
            raise AudioProcessFailed(f"it sent {head.kind.name} when it started")
        self.pid = unpack_number(payload)

    async def send_file(self, data: list[bytearray], request: DecodeRequest, seconds: float) -> None:
        """Takes the parts out of `data`: from now on the process has them."""
        try:
            async with asyncio.timeout(seconds):
                self._writer.write(request.pack())
                data.reverse()
                while data:
                    self._writer.write(data.pop())
                    await self._writer.drain()
        except TimeoutError:
            raise AudioProcessFailed(f"it did not read the file in {seconds:.1f} s") from None
        except ConnectionError:
            raise AudioProcessFailed("it ended") from None

    async def next_window(self, max_samples: int, seconds: float) -> Window:
        """The next window of a file whose last one has not come. Raises `AudioRefused` too."""
        self._writer.write(NEXT)
        head, payload = await self._reply(seconds, max(MAX_TEXT, 4 * max_samples))
        match head.kind:
            case Kind.WINDOW:
                return Window(len(payload) // 4, payload, head.is_last)
            case Kind.SILENCE:
                return Window(unpack_number(payload), b"", head.is_last)
            case Kind.REFUSED:
                raise AudioRefused(payload.decode(errors="replace"))
            case Kind.EXHAUSTED:
                raise AudioRefused("decoding it takes too much memory")
            case Kind.READY:
                raise AudioProcessFailed("it sent READY for a window")

    def close(self) -> None:
        self._writer.transport.abort()

    async def _reply(self, seconds: float, max_bytes: int) -> tuple[Head, bytes]:
        try:
            async with asyncio.timeout(seconds):
                head = Head.unpack(await self._reader.readexactly(HEAD_SIZE))
                if head.size > max_bytes:
                    raise AudioProcessFailed(f"it sent {head.size} bytes, at most {max_bytes} were expected")
                return head, await self._reader.readexactly(head.size)
        except TimeoutError:
            raise AudioProcessFailed(f"it did not reply in {seconds:.1f} s") from None
        except ValueError as error:
            raise AudioProcessFailed(f"its reply cannot be read: {error}") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise AudioProcessFailed("it ended") from None


class _Program:
    """The program that forks. `control`: the gateway's end of its socket."""

    def __init__(self, process: Process, control: socket.socket) -> None:
        self._process = process
        self._control = control

    @classmethod
    async def start(cls, max_memory: int) -> "_Program":
        """`max_memory`: bytes of address space of each process. Raises `AudioProcessFailed` and `OSError`."""
        variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "proa_gateway.audio.child", str(max_memory)),
                    stdin=theirs.fileno(),
                    stdout=DEVNULL,
                    env=variables | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                    start_new_session=True,  # not ended by the terminal's Ctrl-C, before the gateway has drained
                )
            except BaseException:
                control.close()
                raise
        program = cls(process, control)
        try:
            async with asyncio.timeout(START_SECONDS):
                ready = await asyncio.get_running_loop().sock_recv(control, HEAD_SIZE)
            if not ready:
                raise AudioProcessFailed(f"it ended with status {await process.wait()} when it started")
        except TimeoutError:
            await program.close()
            raise AudioProcessFailed(f"it did not start in {START_SECONDS:.0f} s") from None
        except BaseException:
            await program.close()
            raise
        return program

    async def fork(self) -> AudioProcess:
        """Raises `AudioProcessFailed` and `OSError`."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [pack_control(Control.FORK)], [theirs.fileno()])
                process = AudioProcess(*await asyncio.open_connection(sock=ours))
            except BaseException:
                ours.close()
                raise
        try:
            await process.wait_for_start()
        except BaseException:
            process.close()
            raise
        return process

    def end(self, pid: int) -> None:
        """Kill one of its processes, if it still runs."""
        with suppress(OSError):  # the program has ended; so does a process whose socket is closed
            self._control.send(pack_control(Control.END, pid))

    async def close(self) -> None:
        """Kill it. Its processes end as their sockets are closed."""
        with suppress(ProcessLookupError):
            self._process.kill()
        self._control.close()
        await self._process.wait()


class AudioProcesses:
    """Starts the program when it is needed, and keeps it. `on_failure` is called for each process that died or was
    late.

    A process waits without a limit of its own while its file's windows are read: an hour of audio takes as long as
    engines take. What is limited is how many decode at the same time (`turn`), and memory.
    """

    def __init__(self, count: int, max_memory: int, on_failure: Callable[[], None]) -> None:
        """`count`: processes that decode at the same time."""
        self._max_memory = max_memory
        self._on_failure = on_failure
        self._turns = asyncio.Semaphore(count)  # first come, first served
        self._starting = asyncio.Lock()
        self._program: _Program | None = None

    @asynccontextmanager
    async def process(self) -> AsyncIterator[AudioProcess]:
        """A process for one file, killed on exit. Raises `AudioProgramFailed`."""
        try:
            program, process = await self._fork()
        except (AudioProcessFailed, OSError) as error:
            raise AudioProgramFailed(str(error)) from error
        try:
            yield process
        except AudioProcessFailed:
            self._on_failure()
            raise
        finally:
            program.end(process.pid)
            process.close()

    @asynccontextmanager
    async def turn(self, seconds: float) -> AsyncIterator[None]:
        """In which a process decodes. Raises `Overloaded` if there is none after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._turns.acquire()
        except TimeoutError:
            message = "The server is at its limit of audio files that are decoded at the same time."
            raise Overloaded(message, limit="audios") from None
        try:
            yield
        finally:
            self._turns.release()

    async def close(self) -> None:
        """End the program. No file is being decoded any more."""
        if self._program is not None:
            await self._program.close()

    async def _fork(self) -> tuple[_Program, AudioProcess]:
        program = await self._started_program()
        try:
            return program, await program.fork()
        except (AudioProcessFailed, OSError) as error:  # it has ended
            _log.warning("the program that decodes audio is replaced: %s", error)
            self._on_failure()
            if self._program is program:
                self._program = None
                await program.close()
            program = await self._started_program()
            return program, await program.fork()

    async def _started_program(self) -> _Program:
        async with self._starting:
            if self._program is None:
                self._program = await _Program.start(self._max_memory)
            return self._program
