"""The output file of a batch, which a later run with the same files continues."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from proa_gateway.batch.lines import Answered


@contextmanager
def open_output(path: Path) -> Iterator[tuple[BinaryIO, Answered]]:
    """The file, for lines to append, and what it has. A last line that was cut off is removed. Raises `ValueError` if
    the file is not the output of a batch."""
    if not path.is_file():  # new, or no file but a pipe
        with path.open("wb") as file:
            yield file, Answered()
        return
    with path.open("rb+") as file:
        answered = Answered()
        os.truncate(path, _read(path, answered))
        file.seek(0, os.SEEK_END)
        yield file, answered


def _read(path: Path, answered: Answered) -> int:
    """Add all whole lines. Return their size in bytes."""
    size = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                answered.add(line)
            except (ValueError, LookupError, TypeError):
                raise ValueError(f"{path}: line {number} is not the output of a batch") from None
            size += len(line)
    return size
