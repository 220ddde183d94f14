"""Read tensors of files ahead of the layers that ask for them, while earlier ones are copied to the device.

A layer asks for the same parts of the same tensors as the layer before it. So when a tensor is asked for, those of the
next layers that differ from it in the layer's number alone are queued, and threads read them. In the first layer, the
next experts' tensors are queued in the same way.

Memory-mapped files were slower: a page fault reads the disk in small pieces, one at a time, and a GPU's copy from them
goes through a second buffer. Reading the files from their beginning to their end would read what other ranks hold, in
an order (layers 0, 1, 10, 11, …) that is not the layers'.
"""

import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from math import prod
from pathlib import Path
from threading import Lock, local

import numpy as np
import torch
from numpy.typing import NDArray

from proa_engine.layers.weights import Slice
from proa_engine.models.digest import WeightsDigest
from proa_engine.sources.tensors import Tensor

NUM_THREADS = 16  # network disks send little data to each; with 8, one that takes 10 ms for 128 KiB was 30 % slower
PIECE_BYTES = 16 * 2**20  # at most, of one read
AHEAD_BYTES = 512 * 2**20  # at most, read for tensors that are not asked for yet
LAYERS_AHEAD = 2
EXPERTS_AHEAD = 16
LEAST_RUN_BYTES = 256 * 2**10  # shorter runs of bytes are read together with what lies between them
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # of a layer or an expert

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Piece:
    """`rows` runs of `run` bytes of a file, the first at `start`, one every `stride` bytes."""

    start: int
    rows: int
    run: int
    stride: int

    @property
    def num_bytes(self) -> int:
        return self.rows * self.run


def split(tensor: Tensor, part: Slice | None) -> list[Piece]:
    """The pieces of a file that have `part` (default: all) of a tensor, in its order."""
    rows, run, stride, start = 1, tensor.num_bytes, tensor.num_bytes, tensor.start
    if part is not None:
        values, item_bytes = tensor.item
        inner = prod(tensor.shape[part.dim + 1 :])  # values for each entry along the dimension
        rows, run, stride = (
            prod(tensor.shape[: part.dim]),
            part.length * inner // values * item_bytes,
            tensor.shape[part.dim] * inner // values * item_bytes,
        )
        start += part.start * inner // values * item_bytes
    if run == stride:  # the runs are adjacent
        rows, run = 1, rows * run
    if rows == 0 or run == 0:
        return []
    if rows == 1 or run >= LEAST_RUN_BYTES:
        return [
            Piece(begin, 1, min(PIECE_BYTES, first + run - begin), run)
            for first in range(start, start + rows * stride, stride)
            for begin in range(first, first + run, PIECE_BYTES)
        ]
    group = max(PIECE_BYTES // stride, 1)
    return [Piece(start + row * stride, min(group, rows - row), run, stride) for row in range(0, rows, group)]


@dataclass(slots=True)
class _Reading:
    """A part of a tensor of which pieces are read. `whole`: all its bytes in host memory, if they stay there."""

    path: Path
    pieces: list[Piece]
    whole: torch.Tensor | None
    num_submitted: int = 0
    submitted: deque[tuple[Future[bytes], torch.Tensor]] = field(default_factory=deque)
    is_asked: bool = False


class ReadAhead:
    """Reads parts of tensors into memory of a device. `read` may be called in several threads.

    The threads' host memory is at most `AHEAD_BYTES`, and a piece a thread for each call of `read`. On a GPU this is
    page-locked memory, whose buffers PyTorch rounds up to powers of two. Parts that stay in host memory are read to
    their final place.
    """

    def __init__(
        self, tensors: Mapping[str, tuple[Path, Tensor]], device: torch.device, digest: WeightsDigest | None = None
    ) -> None:
        """What `read` returns is also added to `digest`, if it is given."""
        self._tensors = tensors
        self._digest = digest
        self._device = device
        self._is_staged = device.type != "cpu"
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="read-weights")
        self._scratch = local()  # a buffer of each thread, for runs with gaps
        self._files: dict[Path, int] = {}  # descriptors
        self._lock = Lock()  # of all that follows
        self._planned: dict[tuple[str, Slice | None], _Reading] = {}  # not asked for
        self._asked: set[tuple[str, Slice | None]] = set()
        self._waiting: deque[_Reading] = deque()  # those with pieces that are not submitted
        self._num_bytes = 0  # submitted and not returned
        self._num_copied = 0  # to a GPU, since the last copy that is known to be complete

    def read(self, name: str, part: Slice | None, is_needed: Callable[[str], bool]) -> torch.Tensor:
        """The bytes of `part` (default: all) of a tensor, as stored. Tensors of later layers are read ahead if they
        are needed.

        Raises ValueError if a file cannot be read.
        """
        with self._lock:
            found = self._planned.pop((name, part), None)
            reading = found or self._make(name, part)
            reading.is_asked = True
            self._asked.add((name, part))
            for later in self._later(name, EXPERTS_AHEAD if found is None else 0):
                if (later, part) not in self._planned and (later, part) not in self._asked and is_needed(later):
                    self._planned[later, part] = planned = self._make(later, part)
                    self._waiting.append(planned)
        result, hashes = self._finish(reading)
        if self._digest is not None:  # not in the threads: what they have read ahead may never be asked for
            self._digest.add(name, self._tensors[name][1], part, hashes)
        return result

    def close(self) -> None:
        """End the threads and close the files."""
        self._threads.shutdown(cancel_futures=True)
        while self._files:
            os.close(self._files.popitem()[1])
        if self._device.type == "cuda":
            self._planned.clear()
            torch._C._host_emptyCache()  # torch.accelerator's is newer than PyTorch 2.11

    def _finish(self, reading: _Reading) -> tuple[torch.Tensor, list[bytes]]:
        """Return the bytes, and what `_read_piece` returned for each piece."""
        hashes: list[bytes] = []
        size = sum(piece.num_bytes for piece in reading.pieces)
        result = torch.empty(size, dtype=torch.uint8, device=self._device) if reading.whole is None else reading.whole
        begin = 0
        for number, piece in enumerate(reading.pieces):
            with self._lock:
                while reading.num_submitted < min(number + NUM_THREADS, len(reading.pieces)):
                    self._submit(reading)
                self._submit_waiting()
            future, buffer = reading.submitted.popleft()
            hashes.append(future.result())
            if self._is_staged:
                result[begin : begin + piece.num_bytes].copy_(buffer, non_blocking=True)
            begin += piece.num_bytes
            with self._lock:
                self._release(piece.num_bytes)
        return result, hashes

    def _release(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes
        self._num_copied += num_bytes
        if self._device.type == "cuda" and self._num_copied >= AHEAD_BYTES:
            # PyTorch keeps a page-locked buffer until its copy is complete.
            torch.cuda.current_stream(self._device).synchronize()
            self._num_copied = 0

    def _later(self, name: str, num_experts: int) -> Iterator[str]:
        """Names of the next layers' and experts' tensors of the same type and shape."""
        _, tensor = self._tensors[name]
        for match, count in zip(_NUMBER.finditer(name), (LAYERS_AHEAD, num_experts), strict=False):
            for number in range(int(match[0]) + 1, int(match[0]) + 1 + count):
                later = f"{name[: match.start()]}{number}{name[match.end() :]}"
                if later in self._tensors:
                    _, other = self._tensors[later]
                    if (other.dtype, other.shape) == (tensor.dtype, tensor.shape):
                        yield later

    def _make(self, name: str, part: Slice | None) -> _Reading:
        path, tensor = self._tensors[name]
        pieces = split(tensor, part)
        size = sum(piece.num_bytes for piece in pieces)
        return _Reading(path, pieces, None if self._is_staged else torch.empty(size, dtype=torch.uint8))

    def _submit_waiting(self) -> None:
        while self._waiting:
            reading = self._waiting[0]
            if reading.is_asked or reading.num_submitted == len(reading.pieces):
                self._waiting.popleft()
            elif self._num_bytes + reading.pieces[reading.num_submitted].num_bytes > AHEAD_BYTES:
                return
            else:
                self._submit(reading)

    def _submit(self, reading: _Reading) -> None:
        piece = reading.pieces[reading.num_submitted]
        if reading.whole is None:
            is_cuda = self._device.type == "cuda"
            buffer = torch.empty(piece.num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        else:
            begin = sum(each.num_bytes for each in reading.pieces[: reading.num_submitted])
            buffer = reading.whole[begin : begin + piece.num_bytes]
        self._num_bytes += piece.num_bytes
        reading.num_submitted += 1
        file = self._open(reading.path)
        future = self._threads.submit(self._read_piece, reading.path, file, piece, buffer.numpy())
        reading.submitted.append((future, buffer))

    def _open(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            # The kernel asks a network disk for 256 KiB at a time instead of 128 KiB, which was twice as fast.
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return self._files[path]

    def _read_piece(self, path: Path, file: int, piece: Piece, target: Bytes) -> bytes:
        """Read a piece into `target`. Returns its SHA-256, or nothing without a digest."""
        if piece.rows == 1:
            _read_run(path, file, piece.start, target)
        else:
            self._read_rows(path, file, piece, target)
        return b"" if self._digest is None else sha256(target.data).digest()

    def _read_rows(self, path: Path, file: int, piece: Piece, target: Bytes) -> None:
        if not hasattr(self._scratch, "buffer"):
            self._scratch.buffer = np.empty(PIECE_BYTES, np.uint8)
        span = self._scratch.buffer[: (piece.rows - 1) * piece.stride + piece.run]
        _read_run(path, file, piece.start, span)
        rows = np.lib.stride_tricks.as_strided(span, (piece.rows, piece.run), (piece.stride, 1))
        np.copyto(target.reshape(piece.rows, piece.run), rows)


def _read_run(path: Path, file: int, start: int, target: Bytes) -> None:
    done = 0
    while done < len(target):
        try:
            count = os.preadv(file, [target.data[done:]], start + done)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
        if count == 0:
            raise ValueError(f"{path} has become shorter since its header was read; is it still being written?")
        done += count
