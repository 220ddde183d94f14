"""LoraRegistry: the adapters that requests may name, whether or not an engine has them loaded now."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from proa.contract import Lora
from proa.lora_module import LoraModule

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KnownLora:
    """`lora.digest` is empty until an engine has loaded it. `given`: by an operator, through a flag or a request."""

    lora: Lora
    base_model: str | None  # None: the gateway's only model
    given: bool


class LoraRegistry:
    """An adapter is known from the first engine that reports it, or from an operator, until it is unloaded here.

    Engines also unload adapters for lack of memory, so an engine that no longer has one changes nothing.
    """

    def __init__(self, modules: Iterable[LoraModule] = ()) -> None:
        self._known = {
            each.name: KnownLora(Lora(name=each.name, path=each.path, digest=""), each.base_model_name, given=True)
            for each in modules
        }

    def __iter__(self) -> Iterator[KnownLora]:
        return iter(tuple(self._known.values()))

    def get(self, name: str) -> KnownLora | None:
        return self._known.get(name)

    def give(self, lora: Lora, base_model: str) -> None:
        """Add or replace an adapter that an operator has loaded."""
        self._known[lora.name] = KnownLora(lora, base_model, given=True)

    def learn(self, lora: Lora, base_model: str) -> None:
        """Add an adapter that an engine has loaded. The last report of a name counts; an operator's path counts more
        than an engine's."""
        known = self._known.get(lora.name)
        if known is not None:
            if known.base_model not in (None, base_model):
                _log.warning("adapter %s of %s ignored: %s has one", lora.name, base_model, known.base_model)
                return
            if known.given and known.lora.path != lora.path:
                _log.warning("adapter %s at %s ignored: it is at %s", lora.name, lora.path, known.lora.path)
                return
        self._known[lora.name] = KnownLora(lora, base_model, given=known is not None and known.given)

    def forget(self, name: str) -> None:
        self._known.pop(name, None)
