"""A digest of a model's weights, read in milliseconds: two folders with the same one hold the same weights."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from proa_engine.models.folders import weight_files

_LENGTH_BYTES = 8  # of a safetensors file's header
_SAMPLE_BYTES = 256  # of each tensor


def weights_digest(folder: Path) -> bytes:
    """Return the SHA-256 over config.json and, of each weight file, its name, size and header, and the first bytes of
    each tensor. Weights that differ only behind those have the same digest: trained weights do not."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(weight_files(folder)):
        digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        for sample in _samples(path):
            digest.update(sample)
    return digest.digest()


def _samples(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = file.read(length)
        yield header
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        for start, end in sorted(tensor["data_offsets"] for tensor in tensors.values()):
            file.seek(_LENGTH_BYTES + length + start)
            yield file.read(min(_SAMPLE_BYTES, end - start))
