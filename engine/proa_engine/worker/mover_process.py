"""MoverProcess: a rank's mover as its worker sees it. It is started again when it dies or hangs, every 10 s at most."""

import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Lock, Thread

import msgspec

from proa_engine.core.mover import Adopted, Fetched
from proa_engine.core.types import Copies
from proa_engine.framing import FrameReader, encode
from proa_engine.mover.directory import Directory
from proa_engine.mover.layout import ArenaLayout
from proa_engine.mover.messages import (
    Adopt,
    Adoption,
    Alive,
    Copied,
    Fetch,
    FromCore,
    Init,
    Listening,
    Log,
    OnDisk,
    Progress,
    Refused,
    Reset,
    ToCore,
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

    `on_message` is called from a thread of its own with what the mover sends to the core, and with the ends of what its
    death ends. `log` is called with lines about deaths.
    """

    def __init__(
        self, init: Init, arena: int, on_message: Callable[[ToCore], None], log: Callable[[str], None]
    ) -> None:
        """`arena` is the file descriptor of the memory."""
        self._init = init
        self._arena = arena
        self._directory = Directory(arena, init.layout) if init.layout.has_directory else None
        self._on_message = on_message
        self._log = log
        self._unanswered: deque[Adopted] = deque()  # ranges of pages, with nothing in them
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

    def send(self, message: FromCore) -> None:
        """Pass a message on. From any thread. A job is ended at once while the mover is dead."""
        with self._lock:
            match message:
                case Reset(since):
                    self._begin_epoch(since)
                case Fetch(job):
                    self._jobs.add(job.job_id)
                case Adopt():
                    self._unanswered.extend(_nothing_adopted(self._init.layout))
            is_sent = self._send(message)
        if is_sent:
            return
        match message:
            case Fetch(job):
                self._end(Fetched(job_id=job.job_id, num_blocks=0, is_done=True, error="the mover has died"))
            case Adopt():
                self._end_adoption()

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

    def _begin_epoch(self, since: float) -> None:
        """Let no later mover or engine find what is in the arena."""
        epoch = 0 if self._directory is None else self._directory.begin_epoch(since)
        disk = self._init.disk and msgspec.structs.replace(self._init.disk, adopts=False)
        self._init = msgspec.structs.replace(self._init, since=max(since, self._init.since), epoch=epoch, disk=disk)

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
            self._end_adoption()
            if self._closing.wait(max(self._started + _RESTART_SECONDS - time.monotonic(), 0.0)):
                return
            with self._lock, suppress(OSError, ValueError):
                self._start()

    def _read(self) -> None:
        """Read the messages of one life."""
        while (message := self._reader.read()) is not None:
            match message:
                case Progress(fetched):
                    self._end(fetched)
                case Adoption():
                    self._unanswered.popleft()
                    self._on_message(message)
                case OnDisk():
                    self._on_message(message)
                case Log(line):
                    self._log(line)
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
        self._on_message(Progress(fetched))

    def _end_adoption(self) -> None:
        """Answer for the mover, which has died, the ranges that it has not answered."""
        with self._lock:
            unanswered, self._unanswered = self._unanswered, deque()
        for adopted in unanswered:
            self._on_message(Adoption(adopted))

    def _send(self, message: ToMover) -> bool:
        """Send without waiting, because steps call this; a mover that does not read is killed. Returns whether it was
        sent."""
        frame = encode(message)
        with suppress(OSError):
            if self._sender.send(frame) == len(frame):
                return True
        self._process.kill()
        return False


def _nothing_adopted(layout: ArenaLayout) -> list[Adopted]:
    """Return answers for all ranges of pages."""
    ranges = layout.page_ranges
    return [
        Adopted(number=number, first_page=first, end_page=end, is_done=number == len(ranges) - 1)
        for number, (first, end) in enumerate(ranges)
    ]
