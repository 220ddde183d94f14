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
    """Why an adapter could not be loaded or unloaded. The message is a sentence for the user."""


class LoraNotFound(LoraError):
    pass


class LoraInvalid(LoraError):
    pass


class LoraExists(LoraError):
    pass


class TooManyLoras(LoraError):
    pass


class LoraStore(Protocol):
    """Adapters in host memory, by an id that is never reused. Steps copy them into slots of the device."""

    def load_lora(self, lora_id: int, path: str) -> "Future[str]":
        """Read an adapter on every rank, beside steps. Adapters are read one at a time, except those that time out.

        The future's result is the digest of the adapter's content, the SHA-256 in hexadecimal. It fails with
        `LoraInvalid` or `LoraNotFound`; the latter also if reading takes minutes, so that one folder cannot block the
        adapters after it.
        """
        ...

    def unload_lora(self, lora_id: int) -> None:
        """Free the adapter's memory. Later steps may use it only from the slots that it is in already."""
        ...


class NoLoraStore:
    """In place of a `LoraStore` where there are no adapters, and none is loaded."""

    def load_lora(self, lora_id: int, path: str) -> "Future[str]":
        raise NotImplementedError

    def unload_lora(self, lora_id: int) -> None:
        raise NotImplementedError
