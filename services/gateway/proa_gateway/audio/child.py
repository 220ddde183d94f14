"""The program that decodes audio files for a gateway, one at a time: `python -m proa_gateway.audio.child BYTES`.

It reads commands from its standard input and writes replies to its standard output (`pipe.py`). It can open no file
and no socket, and has at most `BYTES` of address space.
"""

import resource
import sys
import time
from collections.abc import Iterator
from io import BufferedReader, BufferedWriter

import numpy as np

from proa_gateway.audio.decode import AudioError, Samples, decode_windows
from proa_gateway.audio.pipe import MAX_TEXT, REQUEST_SIZE, Command, DecodeRequest, Kind, pack_head
from proa_gateway.audio.windows import is_silent

STANDARD_FILES = 3  # open: input, output, errors
# A silent WAV file of 8 samples at 8,000 a second, 8 bits each.
WARM_UP = b"RIFF\x2c\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0\x40\x1f\0\0\x40\x1f\0\0\1\0\x08\0data\x08\0\0\0" + 8 * b"\x80"


def main() -> None:
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    assert isinstance(source, BufferedReader)
    assert isinstance(sink, BufferedWriter)
    # All modules and tables are loaded before files can no longer be opened.
    list(decode_windows(WARM_UP, sampling_rate=16_000, max_window=480_000, max_seconds=1))
    limit_resources(int(sys.argv[1]))
    _reply(sink, Kind.READY)
    while (command := source.read(1)) == Command.FILE.value:
        _serve_file(source, sink)
    if command:
        raise SystemExit(f"expected a file, got the command {command!r}")


def limit_resources(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (STANDARD_FILES, STANDARD_FILES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # of files; pipes have no size
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _serve_file(source: BufferedReader, sink: BufferedWriter) -> None:
    request = DecodeRequest.unpack(source.read(REQUEST_SIZE))
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + request.cpu_seconds, hard))
    try:
        data = source.read(request.num_bytes)
        windows = decode_windows(
            data,
            sampling_rate=request.sampling_rate,
            max_window=request.max_window,
            max_seconds=request.max_seconds,
        )
        _send_windows(windows, source, sink)
    except AudioError as error:
        _reply(sink, Kind.REFUSED, str(error).encode()[:MAX_TEXT])
    except MemoryError:
        _reply(sink, Kind.EXHAUSTED)
        raise SystemExit(0) from None  # what FFmpeg left behind is not known


def _send_windows(windows: Iterator[Samples], source: BufferedReader, sink: BufferedWriter) -> None:
    """Reply to each `NEXT` until the last window, or until `CLOSE`."""
    while source.read(1) == Command.NEXT.value:
        window = next(windows, None)
        if window is None:
            _reply(sink, Kind.END)
            return
        if is_silent(window):
            _reply(sink, Kind.SILENCE, len(window).to_bytes(8, "little"))
        else:
            _reply(sink, Kind.WINDOW, np.ascontiguousarray(window, "<f4").tobytes())


def _reply(sink: BufferedWriter, kind: Kind, payload: bytes = b"") -> None:
    sink.write(pack_head(kind, len(payload)))
    sink.write(payload)
    sink.flush()


if __name__ == "__main__":
    main()
