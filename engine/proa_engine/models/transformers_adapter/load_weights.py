"""Fill a model of `transformers` that was built on the meta device with weights.

The library maps the names of a checkpoint to those of its modules, and converts what it stores in another form.
"""

from collections.abc import Collection, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from proa_engine.layers.weights import Slice, WeightSource
from proa_engine.models.weight_sources import CheckpointWeights


@runtime_checkable
class TypedSource(WeightSource, Protocol):
    dtype: torch.dtype  # the model's


class _Stored:
    """A tensor that is read when the library slices it."""

    def __init__(self, source: WeightSource, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.source, self.name, self.shape, self.dtype = source, name, shape, dtype

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, index: object) -> Tensor:
        """`index` is an ellipsis, or a slice of each dimension, at most one of them of a part."""
        part = None
        if isinstance(index, tuple):
            for dim, (along, size) in enumerate(zip(index, self.shape, strict=True)):
                start, stop, _ = along.indices(size)
                if stop - start < size:
                    part = Slice(dim, start, stop - start)
        return self.source.take(self.name, self.shape, part, self.dtype)


def load_weights(model: Any, source: TypedSource, *, others: Collection[str] = ()) -> None:
    """`others`: names in the source that are not the model's.

    Raises ValueError naming tensors that are missing, unexpected or of another shape.
    """
    dtype = source.dtype
    stored: Mapping[str, tuple[int, ...]]
    if isinstance(source, CheckpointWeights):
        stored = source.take_names()
        mapping: list[Any] = get_model_conversion_mapping(model)
    else:
        tied = model.all_tied_weights_keys
        stored = {name: tuple(each.shape) for name, each in model.state_dict().items() if name not in tied}
        mapping = []
    plan = model._get_dtype_plan(dtype)
    config = LoadStateDictConfig(device_map={"": source.device}, dtype=dtype, dtype_plan=plan, weight_mapping=mapping)
    exact = torch.float32 if plan else dtype
    state = {name: _Stored(source, name, shape, exact) for name, shape in stored.items() if name not in others}
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        info, _ = type(model)._load_pretrained_model(model, state, None, config)
        info = type(model)._finalize_model_loading(model, config, info)
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()
    problems = [f"missing {name}" for name in sorted(info.missing_keys)]
    problems += [f"{name} has shape {list(got)}, not {list(want)}" for name, got, want in sorted(info.mismatched_keys)]
    problems += [f"{name}: {text}" for name, text in info.conversion_errors.items()]
    problems += [f"unexpected {name}" for name in sorted(info.unexpected_keys)]
    if problems:
        shown = "; ".join(problems[:20]) + (f"; and {len(problems) - 20} more" if len(problems) > 20 else "")
        raise ValueError(f"the weights do not fit the model: {shown}")
