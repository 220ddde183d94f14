"""The mover program: serves and fetches pages for one rank, until its worker closes the control socket."""

import signal
import socket
import time
from contextlib import suppress
from threading import Lock, Thread

import msgspec

from proa_engine.core.kv.mover import DiskChanges, Fetched
from proa_engine.framing import FrameReader, encode
from proa_engine.mover.adoption import adopt
from proa_engine.mover.arena import Arena
from proa_engine.mover.client import Client
from proa_engine.mover.directory import Directory, NoDirectory
from proa_engine.mover.disk import Disk, NoDisk
from proa_engine.mover.disk_reader import DiskReader, NoDiskReader
from proa_engine.mover.index import Index
from proa_engine.mover.messages import (
    Adopt,
    AdoptionProgress,
    Alive,
    Cancel,
    Copied,
    Fetch,
    Init,
    Listening,
    Log,
    OnDisk,
    Progress,
    Refused,
    Reset,
    ToMover,
    ToWorker,
    WriteBlocks,
)
from proa_engine.mover.server import Server
from proa_engine.tls import Plaintext, Tls, make_tls

_ALIVE_SECONDS = 1.0


def run_mover(control_descriptor: int, arena_descriptor: int) -> int:
    """Run the mover over inherited file descriptors: its end of the control socket, and the arena's memory. Returns the
    exit code."""
    # Kubernetes signals all containers of a pod at once, a terminal all processes of a group. The engine drains first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=control_descriptor) as control:
        return Mover(control, arena_descriptor).run()


class Mover:
    """Runs until `control` ends, whose other end the worker has. The arena is mapped from its descriptor."""

    def __init__(self, control: socket.socket, arena_descriptor: int) -> None:
        self._control = control
        self._arena_descriptor = arena_descriptor
        self._sending = Lock()

    def run(self) -> int:
        reader = FrameReader(self._control, msgspec.msgpack.Decoder(ToMover))
        init = reader.read()
        if init is None:
            return 0
        assert isinstance(init, Init)
        arena, directory = Arena(self._arena_descriptor, init.layout), self._directory(init)
        index = Index(arena, init.since, init.copied, directory)
        try:
            tls = make_tls(init.tls)
            port = _serve(init, arena, index, tls)
        except ValueError as error:
            self._send(Refused(str(error)))
            return 1
        except OSError as error:
            where = f"{init.host or '*'}:{init.port}"
            self._send(Refused(f"kv_transfer_address: cannot listen on {where}: {error.strerror or error}"))
            return 1
        client = Client(arena, index, init, self._report, tls, self._log)
        disk, reader_of_disk = self._make_disk(init, arena, index)
        self._send(Listening(port))
        Thread(target=self._show_life, name="proa-mover-alive", daemon=True).start()
        disk.start()
        while (message := reader.read()) is not None:
            match message:
                case Copied():
                    index.settle(message.serial, message.blocks, message.checkpoints)
                case Fetch(job):
                    if not reader_of_disk.fetch(job):
                        client.fetch(job)
                case Cancel(job_id):
                    client.cancel(job_id)
                    reader_of_disk.cancel(job_id)
                case WriteBlocks():
                    disk.write(message)
                case Reset():
                    index.reset(message.since, message.copied)
                    disk.reset()
                case Adopt():
                    assert isinstance(directory, Directory), "only an engine whose arena is a file adopts it"
                    arguments = (arena, directory, index)
                    Thread(target=self._adopt, args=arguments, name="proa-mover-adopt", daemon=True).start()
                case Init():
                    raise AssertionError(message)
        disk.close()
        return 0

    def _directory(self, init: Init) -> Directory | NoDirectory:
        if not init.layout.has_directory:
            return NoDirectory()
        return Directory(self._arena_descriptor, init.layout, init.epoch)

    def _make_disk(
        self, init: Init, arena: Arena, index: Index
    ) -> tuple[Disk, DiskReader] | tuple[NoDisk, NoDiskReader]:
        def report(changes: DiskChanges) -> None:
            self._send(OnDisk(init.rank, changes))

        if init.disk is None:
            return NoDisk(), NoDiskReader()
        disk = Disk(init.disk, arena, index, report, self._log)
        return disk, DiskReader(disk, arena, index, self._report)

    def _adopt(self, arena: Arena, directory: Directory, index: Index) -> None:
        for adopted in adopt(arena, directory, index):
            self._send(AdoptionProgress(adopted))

    def _report(self, fetched: Fetched) -> None:
        self._send(Progress(fetched))

    def _log(self, line: str) -> None:
        self._send(Log(line))

    def _show_life(self) -> None:
        while True:
            time.sleep(_ALIVE_SECONDS)
            self._send(Alive())

    def _send(self, message: ToWorker) -> None:
        with suppress(OSError), self._sending:
            self._control.sendall(encode(message))


def _serve(init: Init, arena: Arena, index: Index, tls: Tls | Plaintext) -> int | None:
    """Serve other engines, and return the port; None if this one serves none. Raises `OSError`."""
    if init.port is None:
        return None
    listener = _listen(init.host, init.port)
    server = Server(listener, arena, index, init, tls)
    Thread(target=server.serve_forever, name="proa-mover-accept", daemon=True).start()
    port: int = listener.getsockname()[1]
    return port


def _listen(host: str, port: int) -> socket.socket:
    """Raises `OSError`."""
    if host or not socket.has_dualstack_ipv6():
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
