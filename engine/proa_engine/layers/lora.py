"""Adapters in linear layers: `LoraMethod` adds them to every product that it loads."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from proa_engine.kernels.experts.moe import ExpertActivation
from proa_engine.kernels.experts.moe_pairs import ExpertRange
from proa_engine.kernels.fp8 import Fp8Form, QuantizedRows
from proa_engine.kernels.products.lora import LoraShape, SlotAdapters, TokenSlots, make_slot_adapters
from proa_engine.kernels.products.skinny_gemm import PLAIN, Activation, InputForm, PlainRows, SkinnyGemm
from proa_engine.kernels.silu_and_mul import activate_as
from proa_engine.layers.weights import Experts, LinearMethod, LoadedLinear, Projection, Slice, StackedExperts

# Parts of models whose decoder is not all: encoders, and what fits their outputs to the decoder.
AUDIO_ENCODERS = frozenset(("audio_tower", "embed_audio"))
ENCODERS = AUDIO_ENCODERS | {"visual", "vision_tower", "vision_model", "multi_modal_projector", "embed_vision"}


@dataclass(frozen=True, slots=True)
class LoraSegment:
    """Neighbouring outputs of a product that belong to one module of the model."""

    module: str  # from `layers.` on
    out_features: int  # of the module, before sharding
    in_features: int
    rows: tuple[Slice, ...]  # of B that this rank needs, one after the other; empty: all
    columns: Slice | None  # of A that this rank needs; None: all

    @property
    def num_outputs(self) -> int:
        return sum(part.length for part in self.rows) if self.rows else self.out_features


@dataclass(frozen=True, slots=True)
class LoraProducts:
    """The products of a model that adapters can be applied to, in the order in which they were loaded.

    `tokens` is what their adapters are applied to in the present step.
    """

    num_slots: int
    max_rank: int
    dtype: torch.dtype
    device: torch.device
    batch_invariant: bool = False
    tokens: TokenSlots = field(default_factory=TokenSlots)
    segments: list[tuple[LoraSegment, ...]] = field(default_factory=list)
    adapters: list[SlotAdapters] = field(default_factory=list)  # beside `segments`

    def add(self, projections: Sequence[Projection]) -> SlotAdapters:
        segments = _segments(projections)
        shape = LoraShape(
            self.num_slots,
            self.max_rank,
            projections[0].local_shape[1],
            tuple(segment.num_outputs for segment in segments),
        )
        adapters = make_slot_adapters(shape, self.dtype, self.device, batch_invariant=self.batch_invariant)
        self.segments.append(segments)
        self.adapters.append(adapters)
        return adapters


@dataclass(frozen=True, slots=True)
class LoraMethod:
    """`inner`, with adapters for linear layers of the decoder. Experts and matrices that are not multiplied as such
    have none, nor has an encoder of images."""

    inner: LinearMethod
    products: LoraProducts

    @property
    def width_unit(self) -> int:
        return self.inner.width_unit

    def load(self, projections: Sequence[Projection], bias: torch.Tensor | None) -> LoadedLinear:
        loaded, tokens = self.inner.load(projections, bias), self.products.tokens
        if _is_in_encoder(projections[0].weights.prefix):  # its rows are not the step's tokens
            return loaded
        product = LoraLinear(loaded, self.products.add(projections), tokens)
        gated = None if loaded.gated is None else product.gated
        return LoadedLinear(product, _FormWithoutLora(loaded.input_form, tokens), gated)

    def take_matrix(self, projection: Projection) -> torch.Tensor:
        return self.inner.take_matrix(projection)

    def load_experts(
        self,
        gate_up: Sequence[Sequence[Projection]],
        down: Sequence[Projection],
        held: ExpertRange,
        activation: ExpertActivation,
    ) -> Experts:
        return self.inner.load_experts(gate_up, down, held, activation)

    def load_stacked_experts(self, experts: StackedExperts, activation: ExpertActivation) -> Experts:
        return self.inner.load_stacked_experts(experts, activation)


class LoraLinear:
    """A product and its adapters. Where no token has one, the product is called as without adapters."""

    def __init__(self, loaded: LoadedLinear, adapters: SlotAdapters, tokens: TokenSlots) -> None:
        self.product = loaded.product
        self.gated_product = loaded.gated
        self.adapters = adapters
        self.tokens = tokens

    def __call__(self, x: Activation) -> torch.Tensor:
        """x [T, in_features] -> [T, out_features]"""
        y = self.product(x)
        if not self.tokens.are_empty:
            assert isinstance(x, torch.Tensor)
            self.adapters.add(y, x, self.tokens)
        return y

    def gated(self, x: Activation, form: Fp8Form | None = None) -> torch.Tensor | QuantizedRows:
        """x [T, in_features] -> silu(gate) * up, [T, out_features / 2], as the product's own `gated`."""
        if self.tokens.are_empty:
            assert self.gated_product is not None
            return self.gated_product(x, form)
        return activate_as(self(x), "silu", form)


@dataclass(frozen=True, slots=True, eq=False)
class _FormWithoutLora:
    """`form` in steps where no token has an adapter; else the plain tensor, which adapters need."""

    form: InputForm
    tokens: TokenSlots

    def for_rows(self, num_rows: int) -> SkinnyGemm | Fp8Form | PlainRows:
        return self.form.for_rows(num_rows) if self.tokens.are_empty else PLAIN


def _segments(projections: Sequence[Projection]) -> tuple[LoraSegment, ...]:
    """Return the segments of a product's outputs, in order. Neighbours that belong to one module are one segment."""
    segments: list[LoraSegment] = []
    for projection in projections:
        module, part = module_name(projection.weights.prefix), projection.part
        rows, columns = ((part,), None) if part.dim == 0 else ((), part)
        if segments and segments[-1].module == module:
            rows = (*segments.pop().rows, *rows)
        segments.append(LoraSegment(module, projection.out_features, projection.in_features, rows, columns))
    return tuple(segments)


def module_name(prefix: str) -> str:
    """The name of a module of the decoder from `layers.` on: what is before it depends on the checkpoint and on who
    wrote it. An encoder's modules keep their names, so that none has the name of one of the decoder."""
    start = -1 if _is_in_encoder(prefix) else prefix.find("layers.")
    return prefix[max(start, 0) :]


def _is_in_encoder(prefix: str) -> bool:
    return "model.encoder.layers." in prefix or not ENCODERS.isdisjoint(prefix.split("."))
