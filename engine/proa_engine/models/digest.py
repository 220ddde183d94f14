"""The digest of a model's weights: engines with the same one have loaded the same bytes.

All bytes are hashed by the threads that read them. SHA-256, because processors have instructions for it: 1.5 GB/s a
thread where BLAKE2b, the next of hashlib's, has 0.6. A digest that a hub or a store gave is not taken in its place: it
says what was uploaded, not what is on the disk now.
"""

from collections.abc import Iterable
from hashlib import sha256

from proa_engine.layers.weights import Slice
from proa_engine.sources.tensors import Tensor


class WeightsDigest:
    """The digest of what a rank reads of a checkpoint. It depends on the names, types, shapes, parts and bytes of the
    tensors, not on the order in which they are read, nor on files and their names."""

    def __init__(self) -> None:
        self._read: dict[str, bytes] = {}

    def add(self, name: str, tensor: Tensor, part: Slice | None, hashes: Iterable[bytes]) -> None:
        """Add `part` (None: all) of a tensor, by the SHA-256 of each of its pieces. Thread-safe."""
        self._read[f"{name} {tensor.dtype} {tensor.shape} {part}"] = sha256(b"".join(hashes)).digest()

    def digest(self) -> bytes:
        """Return 32 bytes."""
        return sha256(repr(sorted(self._read.items())).encode()).digest()
