"""Adapters: this rank's adapters in host memory, the device slots that they are copied into, and the adapter of each
token of a step. A slot here belongs to an adapter, not to a request; requests share it."""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from proa_engine.core.lora_store import LoraInvalid
from proa_engine.core.types import BASE_MODEL, EMPTY_LORA, NO_LORA, LoraSlot, NewRequestData
from proa_engine.layers.lora import LoraProducts
from proa_engine.models.lora_weights import digest, open_lora, unchanged
from proa_engine.option_groups import Downloads
from proa_engine.sources.resolve import resolve_lora
from proa_engine.step.columns import Columns, ForwardInputs, Rows
from proa_engine.step.decode_graphs import GraphShape
from proa_engine.step.slots import Edits, SlotTables
from proa_engine.step.staging import IntArray, Packer

_log = logging.getLogger(__name__)
Prepared = list[object]  # by product
LoraFill = Callable[[], None]  # device work that puts an adapter into a slot


class LoraAdapters:
    """This rank's adapters. `load` and `unload` may run on any thread; the other methods belong to the thread that
    builds steps.

    `EMPTY_LORA` is always loaded.
    """

    def __init__(
        self, products: LoraProducts, other_layers: Collection[str] = (), downloads: Downloads | None = None
    ) -> None:
        """`other_layers`: numbers of the layers that other pipeline stages compute. Their matrices are not read."""
        self._products = products
        self._downloads = downloads or Downloads()
        self._other_layers = other_layers
        self._loaded: dict[int, Prepared] = {EMPTY_LORA: [None] * len(products.adapters)}
        self._held = _held_at_first()  # adapter by slot, as the next step will find it

    def load(self, lora_id: int, path: str) -> str:
        """Read an adapter and return its digest. Raises `LoraNotFound` or `LoraInvalid`."""
        folder = resolve_lora(path, self._downloads)
        with unchanged(folder):
            content = digest(folder)
            prepared = self._read(folder)
        self._loaded[lora_id] = prepared
        return content

    def unload(self, lora_id: int) -> None:
        """Free an adapter's memory, if it is loaded."""
        self._loaded.pop(lora_id, None)

    def assign(self, lora: LoraSlot) -> list[LoraFill]:
        """Return the device work to do before the next step: filling the slot, or nothing if it has that adapter."""
        if self._held.get(lora.slot) == lora.lora_id:
            return []
        self._held[lora.slot] = lora.lora_id
        return [partial(_fill, self._products, lora.slot, self._loaded[lora.lora_id])]

    def use(self, slots: torch.Tensor | None) -> None:
        """Set the adapter slot of each token that the model computes next, [T] int64, -1 without one. None: no token
        has one."""
        if slots is None:
            self._products.tokens.clear()
        else:
            self._products.tokens.set(slots, self._products.num_slots)

    def move_to(self, products: LoraProducts) -> None:
        """Use `products` from now on: the same model loaded again, whose slots are empty."""
        self._products = products
        self._held = _held_at_first()

    def _read(self, folder: Path) -> Prepared:
        segments = self._products.segments
        with open_lora(folder, self._products.max_rank, self._products.dtype) as checkpoint:
            known = {segment.module for product in segments for segment in product}
            unknown = [module for module in sorted(checkpoint.modules - known) if not self._is_elsewhere(module)]
            if unknown:
                raise LoraInvalid(
                    f"the adapter at {folder} has matrices for {', '.join(unknown[:5])}"
                    f"{' and others' if len(unknown) > 5 else ''}, to which this model cannot apply adapters"
                )
            if missing := checkpoint.missing(known):
                _log.warning(
                    "the adapter at %s has no matrices for %d modules that its target_modules names, which stay the "
                    "model's own: %s%s",
                    folder,
                    len(missing),
                    ", ".join(missing[:5]),
                    " and others" if len(missing) > 5 else "",
                )
            return [
                adapters.prepare([checkpoint.read(segment) for segment in product])
                for adapters, product in zip(self._products.adapters, segments, strict=True)
            ]

    def _is_elsewhere(self, module: str) -> bool:
        """Whether another pipeline stage has the module, if any stage has it."""
        first, _, rest = module.partition(".")
        return first == "layers" and rest.partition(".")[0] in self._other_layers


@dataclass(frozen=True, slots=True)
class LoraInputs:
    """The adapter slots of a step's tokens."""

    adapters: LoraAdapters
    slots: int | None  # staged index: [tokens], NO_LORA: none; None: no token has one

    def fill(self, forward: ForwardInputs, arrays: Sequence[torch.Tensor]) -> None:
        self.adapters.use(None if self.slots is None else arrays[self.slots])


class LoraColumns(Columns):
    """The adapter slot of each request, on the host."""

    def __init__(self, tables: SlotTables, adapters: LoraAdapters) -> None:
        self._adapters = adapters
        self._slots = np.full(tables.num_slots, NO_LORA, np.int64)

    def add(self, request: NewRequestData, slot: int, edits: Edits) -> None:
        self._slots[slot] = request.lora.slot
        edits.run(self._adapters.assign(request.lora))

    def graph_shape(self, rows: Rows, shape: GraphShape) -> GraphShape:
        return replace(shape, has_loras=True) if self._are_used(rows) else shape

    def lay_out(self, rows: Rows, packer: Packer) -> LoraInputs:
        if not self._are_used(rows):
            return LoraInputs(self._adapters, None)
        return LoraInputs(self._adapters, packer.add(np.repeat(self._slots[rows.slots], rows.counts)))

    def lay_out_decodes(self, rows: Rows) -> IntArray | None:
        return self._slots[rows.slots][None] if self._are_used(rows) else None

    def fill_decodes(self, forward: ForwardInputs, columns: torch.Tensor, shape: GraphShape) -> None:
        self._adapters.use(columns[-1].repeat_interleave(shape.width) if shape.has_loras else None)

    def _are_used(self, rows: Rows) -> bool:
        return bool(self._slots[rows.slots].max() != NO_LORA)


def _held_at_first() -> dict[int, int]:
    """The adapters of slots while the device's are empty. The base model is never put into a slot."""
    return {BASE_MODEL.slot: BASE_MODEL.lora_id}


def _fill(products: LoraProducts, slot: int, prepared: Prepared) -> None:
    for adapters, each in zip(products.adapters, prepared, strict=True):
        adapters.fill(slot, each)
