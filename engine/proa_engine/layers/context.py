"""LayerContext: what all layers of a model are built with."""

from dataclasses import dataclass

from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.rotary import RotaryTables


@dataclass(frozen=True, slots=True)
class LayerContext:
    hidden_size: int
    parallel: ParallelContext
    rotary: RotaryTables  # shared, so that equal tables exist once
