"""MoverProcess: a rank's mover as its worker sees it. It is started again when it dies or hangs, every 10 s at most."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Lock, Thread

import msgspec

from proa_engine.core.mover import Fetched
from proa_engine.core.types import Copies
from proa_engine.framing import FrameReader, encode
from proa_engine.mover.messages import (
    Alive,
    Cancel,
    Copied,
    Fetch,
    Init,
    Listening,
    Progress,
    Refused,
    Reset,
    ToMover,
    ToWorker,
)

_START_SECONDS = 30.0  # until it answers
_SILENCE_SECONDS = 10.0  # after which it is killed; it shows every second that it is alive
_RESTART_SECONDS = 10.0  # from one start to the next
_EXIT_SECONDS = 5.0
_SEND_BYTES = 1 << 22  # of messages that the mover has not read


class MoverProcess:
    """The constructor returns when the mover works. Raises `ValueError`, with a sentence for the user, if it cannot.

    `on_fetched` is called from a thread of its own with the end of each job, also of one that the mover's death ends.
    `log` is called with lines about deaths.
    """

    def __init__(
        self, init: Init, arena: int, on_fetched: Callable[[Fetched], None], log: Callable[[str], None]
    ) -> None:
        """`arena` is the file descriptor of the memory."""
        self._init = init
        self._arena = arena
        self._on_fetched = on_fetched
        self._log = log
        self._lock = Lock()
        self._jobs: set[int] = set()
        self._closing = Event()
        self._started = 0.0
        self._start()
        self._thread = Thread(target=self._run, name="proa-mover", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int | None:
        """The port on which it listens; None: it serves no other engines."""
        return self._init.port

    def send(self, message: Fetch | Cancel | Reset) -> None:
        """Pass a message on. From any thread. A job is ended at once while the mover is dead."""
        with self._lock:
            if isinstance(message, Reset):
                self._init = msgspec.structs.replace(self._init, since=message.since)
            if isinstance(message, Fetch):
                self._jobs.add(message.job.job_id)
            is_sent = self._send(message)
        if not is_sent and isinstance(message, Fetch):
            self._end(Fetched(job_id=message.job.job_id, num_blocks=0, is_done=True, error="the mover has died"))

    def copied(self, copies: Copies) -> None:
        """Tell it that these copies, and all before them, are complete."""
        with self._lock:
            self._init = msgspec.structs.replace(self._init, copied=copies.serial)
            self._send(Copied(copies.serial, tuple(copies.stored_blocks), tuple(copies.stored_checkpoints)))

    def close(self) -> None:
        """End the process, which ends with its socket, or is killed after 5 s."""
        self._closing.set()
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _start(self) -> None:
        self._started = time.monotonic()
        self._control, theirs = socket.socketpair()
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        self._control.settimeout(_START_SECONDS)
        self._sender = self._control.dup()
        self._sender.setblocking(False)
        command = [sys.executable, "-m", "proa_engine", "mover"]
        with theirs:
            command += ["--control", str(theirs.fileno()), "--arena", str(self._arena)]
            descriptors = (theirs.fileno(), self._arena)
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=descriptors)
        self._reader: FrameReader[ToWorker] = FrameReader(self._control, msgspec.msgpack.Decoder(ToWorker))
        self._send(self._init)
        answer = self._reader.read()
        if not isinstance(answer, Listening):
            self._end_process()
            reason = answer.reason if isinstance(answer, Refused) else "it ended before it answered"
            raise ValueError(f"the mover of rank {self._init.rank} did not start: {reason}")
        self._init = msgspec.structs.replace(self._init, port=answer.port)
        self._control.settimeout(_SILENCE_SECONDS)

    def _run(self) -> None:
        """Read until the worker ends, over all of the mover's lives."""
        while True:
            with suppress(OSError):
                self._read()
            self._end_process()
            if self._closing.is_set():
                return
            self._log(f"the mover of rank {self._init.rank} ended with code {self._process.returncode}")
            for job_id in list(self._jobs):
                self._end(Fetched(job_id=job_id, num_blocks=0, is_done=True, error="the mover has died"))
            if self._closing.wait(max(self._started + _RESTART_SECONDS - time.monotonic(), 0.0)):
                return
            with self._lock, suppress(OSError, ValueError):
                self._start()

    def _read(self) -> None:
        """Read the messages of one life."""
        while (message := self._reader.read()) is not None:
            match message:
                case Progress():
                    self._end(message.fetched)
                case Alive():
                    pass
                case _:
                    raise AssertionError(message)

    def _end_process(self) -> None:
        """Wait until the process has ended, so that nothing is written any more; kill it if it hangs."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_SECONDS)
        self._process.kill()
        self._process.wait()
        self._reader.close()
        self._control.close()
        self._sender.close()

    def _end(self, fetched: Fetched) -> None:
        self._jobs.discard(fetched.job_id)
        self._on_fetched(fetched)

    def _send(self, message: ToMover) -> bool:
        """Send without waiting, because steps call this; a mover that does not read is killed. Returns whether it was
        sent."""
        frame = encode(message)
        with suppress(OSError):
            if self._sender.send(frame) == len(frame):
                return True
        self._process.kill()
        return False
