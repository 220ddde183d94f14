"""LoraStore: the interface to the adapters in the host memory of all ranks, and why an adapter cannot be loaded.

LoraError
├── LoraNotFound       there is no adapter of that name, or none at that path
├── LoraInvalid        the adapter does not fit the model
├── LoraExists         another adapter has the name
└── TooManyLoras       all loaded adapters have requests
"""

from concurrent.futures import Future
from typing import Protocol


class LoraError(Exception):
    """The message is a sentence for the user."""


class LoraNotFound(LoraError):
    pass


class LoraInvalid(LoraError):
    pass


class LoraExists(LoraError):
    pass


class TooManyLoras(LoraError):
    pass


class LoraStore(Protocol):
    """Adapters in host memory, by a number that is never used again. Steps copy them into slots of the device."""

    def load_lora(self, lora_id: int, path: str) -> "Future[str]":
        """Read an adapter on every rank, beside steps. One at a time, but for those that take too long.

        The future gets the digest of its content, the SHA-256 in hexadecimal, or `LoraNotFound` or `LoraInvalid`; the
        former too if reading takes minutes, so that one folder cannot block the adapters after it.
        """
        ...

    def unload_lora(self, lora_id: int) -> None:
        """Free its memory. No later step may name it, except in slots that it has already."""
        ...
