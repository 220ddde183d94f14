"""MoverProcess: a rank's mover as its worker sees it. It is started again when it dies or hangs, every 10 s at most."""

import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import SimpleQueue
from threading import Event, Lock, Thread

import msgspec

from proa_engine.core.kv.mover import Adopted, Fetched
from proa_engine.core.types import Copies
from proa_engine.framing import FrameReader, encode
from proa_engine.mover.directory import Directory
from proa_engine.mover.layout import ArenaLayout
from proa_engine.mover.messages import (
    Adopt,
    AdoptionProgress,
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


class MoverProcess:
    """The constructor returns when the mover works. Raises `ValueError`, with a sentence for the user, if it cannot.

    `on_message` is called, from any thread, with what the mover sends to the core. If the mover dies, it is called with
    an end of each open job, and an empty answer for each range of pages that the mover has not answered. `log` is
    called with lines about deaths.
    """

    def __init__(
        self, init: Init, arena: int, on_message: Callable[[ToCore], None], log: Callable[[str], None]
    ) -> None:
        """`arena` is the file descriptor of the memory."""
        self._arena = arena
        self._directory = Directory(arena, init.layout) if init.layout.has_directory else None
        self._on_message = on_message
        self._log = log
        self._closing = Event()
        self._started = 0.0
        self._lock = Lock()  # of the next four
        self._init = init
        self._unsent: SimpleQueue[bytes | None] | None = None  # frames, up to None; None while the mover is dead
        self._jobs: set[int] = set()
        self._unanswered: deque[Adopted] = deque()  # ranges of pages, with nothing in them
        self._start()
        self._thread = Thread(target=self._run, name="proa-mover", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int | None:
        """The port on which it listens; None: it serves no other engines."""
        return self._init.port

    def send(self, message: FromCore) -> None:
        """Pass a message on, from any thread, without waiting. A job is ended at once while the mover is dead."""
        with self._lock:
            if isinstance(message, Reset):
                self._begin_epoch(message.since)
            is_alive = self._queue(message)
            match message:
                case Fetch(job) if is_alive:
                    self._jobs.add(job.job_id)
                case Adopt() if is_alive:
                    self._unanswered.extend(_nothing_adopted(self._init.layout))
        match message:
            case Fetch(job) if not is_alive:
                self._end_dead([job.job_id], [])
            case Adopt() if not is_alive:
                self._end_dead([], _nothing_adopted(self._init.layout))

    def copied(self, copies: Copies) -> None:
        """Tell it that these copies, and all before them, are complete."""
        with self._lock:
            self._init = msgspec.structs.replace(self._init, copied=copies.serial)
            self._queue(Copied(copies.serial, tuple(copies.stored_blocks), tuple(copies.stored_checkpoints)))

    def close(self) -> None:
        """End the process, which first takes what was sent to it; it is killed if it hangs."""
        self._closing.set()
        with self._lock:
            if self._unsent is not None:
                self._unsent.put(None)
            writer = self._writer
        writer.join(_EXIT_SECONDS)
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _begin_epoch(self, since: float) -> None:
        """Let no later mover or engine find what is in the arena."""
        epoch = 0 if self._directory is None else self._directory.begin_epoch(since)
        disk = self._init.disk and msgspec.structs.replace(self._init.disk, adopts=False)
        self._init = msgspec.structs.replace(self._init, since=max(since, self._init.since), epoch=epoch, disk=disk)

    def _queue(self, message: ToMover) -> bool:
        """Queue a message, because steps must not wait. Returns False if the mover is dead."""
        if self._unsent is None:
            return False
        self._unsent.put(encode(message))
        return True

    def _start(self) -> None:
        """Start the process and wait for its answer, without the lock, so that steps do not wait. Raises `ValueError`
        or `OSError`."""
        self._started = time.monotonic()
        control, theirs = socket.socketpair()
        control.settimeout(_START_SECONDS)
        command = [sys.executable, "-m", "proa_engine", "mover"]
        command += ["--control", str(theirs.fileno()), "--arena", str(self._arena)]
        try:
            with theirs:
                descriptors = (theirs.fileno(), self._arena)
                self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=descriptors)
        except BaseException:
            control.close()
            raise
        self._control = control
        self._reader: FrameReader[ToWorker] = FrameReader(control, msgspec.msgpack.Decoder(ToWorker))
        unsent = SimpleQueue[bytes | None]()
        writer = Thread(target=_write, args=(control, unsent), name="proa-mover-write", daemon=True)
        writer.start()
        with self._lock:  # `close` ends and joins the thread of the queue that it finds
            unsent.put(encode(self._init))
            self._unsent, self._writer = unsent, writer
        answer: ToWorker | None = None
        with suppress(TimeoutError):
            answer = self._reader.read()
        if not isinstance(answer, Listening):
            self._end_life()
            reason = answer.reason if isinstance(answer, Refused) else "it did not answer"
            raise ValueError(f"the mover of rank {self._init.rank} did not start: {reason}")
        with self._lock:
            self._init = msgspec.structs.replace(self._init, port=answer.port)
        control.settimeout(_SILENCE_SECONDS)

    def _run(self) -> None:
        """Read until the worker ends, over all of the mover's lives."""
        while True:
            with suppress(OSError):
                if not self._closing.is_set():  # otherwise `close` may have missed a socket that was just made
                    self._read()
            self._end_life()
            if self._closing.is_set():
                return
            self._log(f"the mover of rank {self._init.rank} ended with code {self._process.returncode}")
            if not self._restart():
                return

    def _restart(self) -> bool:
        """Start it again, trying every 10 s. Returns False if the worker ends first."""
        while not self._closing.wait(max(self._started + _RESTART_SECONDS - time.monotonic(), 0.0)):
            try:
                self._start()
                return True
            except (OSError, ValueError) as error:
                self._log(f"{error}; trying again in {_RESTART_SECONDS:.0f} s")
        return False

    def _read(self) -> None:
        """Read the messages of one life."""
        while (message := self._reader.read()) is not None:
            match message:
                case Progress(fetched):
                    with self._lock:
                        self._jobs.discard(fetched.job_id)
                    self._on_message(message)
                case AdoptionProgress():
                    with self._lock:
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

    def _end_life(self) -> None:
        """Wait until the process has ended, and kill it if it hangs. Then end its jobs: nothing is written any more."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_SECONDS)
        self._process.kill()
        self._process.wait()
        with self._lock:
            unsent, self._unsent = self._unsent, None
            jobs, self._jobs = self._jobs, set()
            unanswered, self._unanswered = self._unanswered, deque()
        assert unsent is not None, "a life ends once"
        unsent.put(None)
        self._writer.join()
        self._reader.close()
        self._control.close()
        self._end_dead(jobs, unanswered)

    def _end_dead(self, job_ids: Iterable[int], unanswered: Iterable[Adopted]) -> None:
        """Answer for the mover, which is dead, jobs and ranges of pages."""
        for job_id in job_ids:
            self._on_message(Progress(Fetched(job_id=job_id, num_blocks=0, is_done=True, error="the mover has died")))
        for adopted in unanswered:
            self._on_message(AdoptionProgress(adopted))


def _write(control: socket.socket, unsent: "SimpleQueue[bytes | None]") -> None:
    """Send frames until None. A mover that takes none for the socket's timeout loses the connection, and so ends.

    The socket's buffer alone is no queue: by default Linux limits it to about 400 KB, less than a job of a long prompt.
    """
    try:
        while (frame := unsent.get()) is not None:
            control.sendall(frame)
    except OSError:
        with suppress(OSError):
            control.shutdown(socket.SHUT_RDWR)


def _nothing_adopted(layout: ArenaLayout) -> list[Adopted]:
    """Return answers for all ranges of pages."""
    ranges = layout.page_ranges
    return [
        Adopted(number=number, first_page=first, end_page=end, is_done=number == len(ranges) - 1)
        for number, (first, end) in enumerate(ranges)
    ]
