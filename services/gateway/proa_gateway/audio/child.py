"""The program that decodes audio files for a gateway: `python -m proa_gateway.audio.child BYTES`.

It forks a process for each file (`pipe.py`): that takes 2 ms and 12 MB, a new program 1 s and 75 MB. So a file keeps
its process for as long as its windows are read, and no other one waits for it. Such a process can open no file and no
socket, and has at most `BYTES` of address space.
"""

import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from io import BufferedReader, BufferedWriter

import numpy as np

from proa_gateway.audio.decode import AudioError, Samples, decode_windows
from proa_gateway.audio.pipe import (
    CONTROL_SIZE,
    MAX_TEXT,
    NEXT,
    REQUEST_SIZE,
    Control,
    DecodeRequest,
    Head,
    Kind,
    pack_number,
    unpack_control,
)
from proa_gateway.audio.windows import is_silent

SOCKET = 0  # the program's, and that of each process
STANDARD_FILES = 3  # open: the socket, output, errors
# A silent WAV file of 8 samples at 8,000 a second, 8 bits each.
WARM_UP = b"RIFF\x2c\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0\x40\x1f\0\0\x40\x1f\0\0\1\0\x08\0data\x08\0\0\0" + 8 * b"\x80"


def main() -> None:
    # All modules and tables are loaded before files can no longer be opened.
    list(decode_windows(WARM_UP, sampling_rate=16_000, max_window=480_000, max_samples=480_000))
    if not fork_for_files(socket.socket(fileno=SOCKET)):
        return
    limit_resources(int(sys.argv[1]))
    with suppress(ConnectionError), open(SOCKET, "rb") as source, open(SOCKET, "wb", closefd=False) as sink:
        _reply(sink, Kind.READY, pack_number(os.getpid()))
        _serve_file(source, sink)


def fork_for_files(control: socket.socket) -> bool:
    """Return true in each process that is forked for a file, and false in the program, when its gateway has ended."""
    processes: set[int] = set()
    control.send(Head(Kind.READY, False, 0).pack())
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, CONTROL_SIZE, 1)
        processes -= set(_ended(processes))
        if not message:
            for pid in processes:
                os.kill(pid, signal.SIGKILL)
            return False
        command, pid = unpack_control(message)
        if command is Control.END and pid in processes:
            processes.remove(pid)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for descriptor in descriptors:
            with suppress(OSError):  # the gateway sees that its socket is closed
                if not (pid := os.fork()):
                    control.detach()
                    os.dup2(descriptor, SOCKET)
                    os.close(descriptor)
                    return True
                processes.add(pid)
            os.close(descriptor)


def _ended(processes: set[int]) -> Iterator[int]:
    """Yield those that have ended. Only then their numbers may be those of others."""
    return (pid for pid in processes if os.waitpid(pid, os.WNOHANG) != (0, 0))


def limit_resources(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (STANDARD_FILES, STANDARD_FILES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # of files; sockets have no size
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _serve_file(source: BufferedReader, sink: BufferedWriter) -> None:
    if not (head := source.read(REQUEST_SIZE)):
        return  # no longer wanted
    request = DecodeRequest.unpack(head)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (request.cpu_seconds, hard))
    try:
        windows = decode_windows(
            source.read(request.num_bytes),
            sampling_rate=request.sampling_rate,
            max_window=request.max_window,
            max_samples=request.max_samples,
        )
        _send_windows(windows, source, sink)
    except AudioError as error:
        _reply(sink, Kind.REFUSED, str(error).encode()[:MAX_TEXT])
    except MemoryError:
        _reply(sink, Kind.EXHAUSTED)


def _send_windows(windows: Iterator[tuple[Samples, bool]], source: BufferedReader, sink: BufferedWriter) -> None:
    while source.read(1) == NEXT:
        window, is_last = next(windows)
        if is_silent(window):
            _reply(sink, Kind.SILENCE, pack_number(len(window)), is_last=is_last)
        else:
            _reply(sink, Kind.WINDOW, np.ascontiguousarray(window, "<f4").tobytes(), is_last=is_last)


def _reply(sink: BufferedWriter, kind: Kind, payload: bytes = b"", *, is_last: bool = False) -> None:
    sink.write(Head(kind, is_last, len(payload)).pack())
    sink.write(payload)
    sink.flush()


if __name__ == "__main__":
    main()
