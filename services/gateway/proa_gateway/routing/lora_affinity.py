"""Adapter affinity: what it costs to run a request with an adapter on an engine, beside its load."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from proa.contract import Lora

# In the score's unit, of which a whole cached prompt saves 1.
LOAD_COST = 8.0
"""The engine must load the adapter first. More than cached blocks save and than loads differ in general: an adapter
comes to one more engine when all that have it are overloaded (`score.is_overloaded`)."""
WAIT_COST = 0.5
"""All of a step's adapters are others: the request waits until one of these has no more requests."""
JOIN_COST = 0.05
"""A step has one adapter more. Little more than a tie-break: adapters stay on as few engines as their load allows."""


class LoraState(Protocol):
    """The adapters of an engine."""

    @property
    def has_free_slot(self) -> bool:
        """Whether a step can apply one adapter more than those with requests."""
        ...

    def has(self, lora: Lora) -> bool:
        """Whether it is loaded, or will be soon."""
        ...

    def is_active(self, lora: Lora) -> bool:
        """Whether requests use it, or wait until it is loaded."""
        ...


class HasLoras(Protocol):
    @property
    def loras(self) -> LoraState: ...


Engine = TypeVar("Engine", bound=HasLoras)


def having_lora(engines: Sequence[Engine], lora: Lora) -> Sequence[Engine]:
    """The engines that have the adapter; all if none has."""
    return [engine for engine in engines if engine.loras.has(lora)] or engines


def lora_cost(state: LoraState, lora: Lora) -> float:
    """From 0 for an engine that runs the adapter to the cost of one that must load it and has no slot."""
    load = 0.0 if state.has(lora) else LOAD_COST
    if state.is_active(lora):
        return load
    return load + (JOIN_COST if state.has_free_slot else WAIT_COST)
