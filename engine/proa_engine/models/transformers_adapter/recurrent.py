"""Recurrent mixers of models that `transformers` runs: the library's own modules, with slots of states in the place of
its cache.

All recurrent modules of the library ask the same five functions of a cache. `find_mixers` watches one forward pass: the
module that runs when a state is asked for is a mixer, and the states behind it are what it keeps. A `Recurrent` stands
for it in the model. A step calls the mixer once for all rows of one token that continue a state, and once for each
other segment, with states that are copied from slots and back. The mixer's bits may depend on the batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from proa_engine.layers.attention_metadata import AttentionMetadata, AttentionStep
from proa_engine.layers.cache_layers import LayerCache, StateLayer

Place = tuple[str, int]  # "conv" or "recurrent", and the library's number of the state
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # of a call, by position and by name
# What the library raises where a model does not use its cache.
_BUILDS_NO_CACHE = (AttributeError, KeyError, TypeError, ValueError)
PARTS = 5, 7, 1  # tokens of the calls by which a mixer is tried
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}  # of a token's output, relative


@dataclass(slots=True)
class RowStates:
    """The cache of one call of a mixer, for B rows with equally many tokens. `states`: each [B, ...]; none: the rows
    begin at position 0."""

    states: dict[Place, Tensor] = field(default_factory=dict)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(("recurrent", state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Returns the inputs of before and these, as the library does."""
        before = self.states.get(("conv", state_idx))
        if before is None:
            size = conv_kernel_size or conv_states.shape[-1]
            whole = nn.functional.pad(conv_states, (max(size - conv_states.shape[-1], 0), 0))
        else:
            size, whole = before.shape[-1], torch.cat((before, conv_states), dim=-1)
        self.states["conv", state_idx] = whole[..., -size:].clone()
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.states["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class FoundMixer:
    """A module that asked for states, with the arguments of its call."""

    module: nn.Module
    hidden: Tensor  # [1, T, H]
    cache_name: str  # of the argument
    others: Mapping[str, Any]  # without tensors
    states: Mapping[Place, Tensor]  # [1, ...] each, behind the last token


class _Finder(DynamicCache):
    """The library's cache, which notes who asks for states."""

    def __init__(self, config: Any, note: Callable[[int], None]) -> None:
        super().__init__(config=config)
        self._note = note

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        self._note(layer_idx)
        return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        self._note(layer_idx)
        return super().get_recurrent_state(layer_idx, state_idx)


def find_mixers(decoder: Any, ids: Tensor, positions: Tensor) -> list[FoundMixer]:
    """The mixers of a model of the library, in the order of their calls; none if it has no convolution.

    Raises ValueError, naming the module, if a module with a convolution asks for no state.
    """
    owners = [module for module in decoder.modules() if nn.Conv1d in map(type, module.children())]
    if not owners:
        return []
    calls = _Calls(decoder)
    cache = _Finder(decoder.config, calls.note)
    if cache.layers and not any(isinstance(layer, DynamicLayer) for layer in cache.layers):
        raise ValueError("it has no attention")
    try:
        decoder(ids[None], position_ids=positions[None], past_key_values=cache, use_cache=True)
    except _BUILDS_NO_CACHE as error:
        raise ValueError(f"{type(owners[0]).__name__} keeps a state outside attention") from error
    finally:
        calls.end()
    found = [_found(module, calls.of[module], cache, layers) for module, layers in calls.layers.items()]
    for owner in owners:
        if not any(owner is module for mixer in found for module in mixer.module.modules()):
            raise ValueError(f"{type(owner).__name__} keeps a state outside attention")
    return found


class _Calls:
    """Which modules of a model run, and which layers' states each of them asks for."""

    def __init__(self, model: nn.Module) -> None:
        self._running: list[tuple[nn.Module, _Arguments]] = []
        self.of: dict[nn.Module, _Arguments] = {}
        self.layers: dict[nn.Module, set[int]] = {}
        self._hooks = [module.register_forward_pre_hook(self._enter, with_kwargs=True) for module in model.modules()]
        self._hooks += [module.register_forward_hook(self._leave) for module in model.modules()]

    def _enter(self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._running.append((module, (arguments, options)))

    def _leave(self, *_: object) -> None:
        self._running.pop()

    def note(self, layer_idx: int) -> None:
        """The running module asks for a state of this layer."""
        module, arguments = self._running[-1]
        self.of.setdefault(module, arguments)
        self.layers.setdefault(module, set()).add(layer_idx)

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _found(module: nn.Module, call: _Arguments, cache: _Finder, layers: set[int]) -> FoundMixer:
    arguments, options = call
    name = next((name for name, value in options.items() if value is cache), None)
    hidden = arguments[0] if arguments else options.get("hidden_states")
    if len(layers) > 1:
        raise ValueError(f"{type(module).__name__} keeps the states of several layers")
    if name is None or len(arguments) > 1 or not isinstance(hidden, Tensor) or hidden.dim() != 3:
        raise ValueError(f"{type(module).__name__} is called with its arguments by position")
    layer: Any = cache.layers[min(layers)]
    states = {
        (kind, number): state
        for kind, states in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states))
        for number, state in states.items()
        if state is not None
    }
    others = {
        key: value
        for key, value in options.items()
        if key not in (name, "hidden_states") and not isinstance(value, Tensor | tuple)
    }
    return FoundMixer(module, hidden, name, others, states)


class Around(nn.Module):
    """Holds `inner`; other attributes are those of `inner`, which the model may read."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["inner"], name)


class Recurrent(Around):
    """Stands for a mixer in the model, and hands its input to the step."""

    def __init__(self, found: FoundMixer) -> None:
        super().__init__(found.module)
        self.cache_name, self.others, self.places = found.cache_name, found.others, list(found.states)
        self.layer = StateLayer(tuple((tuple(state.shape[1:]), state.dtype) for state in found.states.values()))
        self.one_by_one = False  # the module forgets its state if it is given several tokens

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        hidden = arguments[0] if arguments else options["hidden_states"]
        mixed: Tensor = self.__dict__["proa_calls"].mix(self, hidden[0])
        return mixed[None]

    def compute(self, hidden: Tensor, states: RowStates) -> Tensor:
        """hidden [B, n, H] -> [B, n, H]; changes `states`."""
        if self.one_by_one and hidden.shape[1] > 1:
            return torch.cat([self.compute(token, states) for token in hidden.split(1, dim=1)], dim=1)
        result: Tensor = self.inner(hidden_states=hidden, **{self.cache_name: states}, **self.others)
        return result

    def alone(self, hidden: Tensor) -> Tensor:
        """A whole sequence, hidden [T, H] -> [T, H]"""
        return self.compute(hidden[None], RowStates())[0]


def try_in_parts(mixer: Recurrent, hidden: Tensor) -> None:
    """Compute hidden [1, T, H] whole, and in parts with states between them. If these differ, the mixer goes on token
    by token. Raises ValueError, naming the module, if it cannot continue a sequence even so."""
    whole = mixer.compute(hidden, RowStates())
    for one_by_one in (False, True):
        mixer.one_by_one, states = one_by_one, RowStates()
        parts = torch.cat([mixer.compute(part, states) for part in hidden.split(PARTS, dim=1)], dim=1)
        difference = ((parts - whole).float().norm(dim=-1) / whole.float().norm(dim=-1)).max()
        if float(difference) < TOLERANCE[hidden.dtype] and states.states.keys() == set(mixer.places):
            return
    raise ValueError(f"{type(mixer.inner).__name__} does not continue a sequence from its states")


@dataclass(frozen=True, slots=True)
class _Segment:
    start: int
    end: int
    slot: int  # to which the state behind it is written; -1: none


@dataclass(frozen=True, slots=True)
class MixedRows:
    """How a step's rows are computed, the same for every mixer."""

    tokens: Tensor  # [B] of the rows of one token that continue a state
    read: Tensor  # [B] slots
    write: Tensor  # [B] slots; -1: none
    others: list[tuple[int, list[_Segment]]]  # of each other row: the slot that it reads, -1: none, and its segments

    @staticmethod
    def of(metadata: AttentionMetadata) -> "MixedRows":
        rows = metadata.states
        assert rows is not None
        read, write = rows.read.tolist(), rows.write.tolist()
        firsts, starts = rows.first_segments.tolist(), rows.segment_start_loc.tolist()
        single: list[tuple[int, int, int]] = []
        others: list[tuple[int, list[_Segment]]] = []
        for row, slot in enumerate(read):
            segments = [
                _Segment(starts[number], starts[number + 1], write[number])
                for number in range(firsts[row], firsts[row + 1])
            ]
            if slot >= 0 and segments[-1].end - segments[0].start == 1:
                single.append((segments[0].start, slot, segments[0].slot))
            else:
                others.append((slot, segments))
        columns = torch.tensor(single, dtype=torch.int64, device=rows.read.device).view(-1, 3)
        return MixedRows(columns[:, 0], columns[:, 1], columns[:, 2], others)


def mix(mixer: Recurrent, hidden: Tensor, cache: LayerCache, step: AttentionStep) -> Tensor:
    """hidden [T, H] -> [T, H]; reads and writes the states of the step's rows in `cache`."""
    rows: MixedRows = step.once(("mixed rows",), lambda: MixedRows.of(step.metadata))
    out = torch.empty_like(hidden)
    if len(rows.tokens):
        states = _read(mixer, cache, rows.read)
        out[rows.tokens] = mixer.compute(hidden[rows.tokens][:, None], states)[:, 0]
        written = rows.write >= 0
        _write(mixer, cache, rows.write[written], states, written)
    for slot, segments in rows.others:
        states = _read(mixer, cache, rows.read.new_tensor([slot])) if slot >= 0 else RowStates()
        for segment in segments:
            part = slice(segment.start, segment.end)
            out[part] = mixer.compute(hidden[part][None], states)[0]
            if segment.slot >= 0:
                _write(mixer, cache, rows.read.new_tensor([segment.slot]), states, slice(None))
    return out


def _read(mixer: Recurrent, cache: LayerCache, slots: Tensor) -> RowStates:
    parts = zip(mixer.places, cache.tensors, strict=True)
    return RowStates({place: part.index_select(0, slots) for place, part in parts})


def _write(mixer: Recurrent, cache: LayerCache, slots: Tensor, states: RowStates, of_rows: Any) -> None:
    for place, part in zip(mixer.places, cache.tensors, strict=True):
        part.index_copy_(0, slots, states.states[place][of_rows].to(part.dtype))
