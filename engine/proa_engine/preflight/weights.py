"""Whether a checkpoint's tensors can be those of its config.json, and the memory that they take: decided from their
names, types and shapes.

Only what all decoders of the registry share is checked here. All tensors are checked when they are loaded.
"""

from collections.abc import Mapping
from typing import Any

from proa_engine.models.safetensors_headers import ITEM_BYTES, Tensor
from proa_engine.models.text_prefix import text_prefix

FLOATS = ("F64", "F32", "F16", "BF16")
_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
_SHOWN = 5


def check_tensors(tensors: Mapping[str, Tensor], fields: Mapping[str, Any], *, architecture: str, folder: str) -> None:
    """`fields`: of config.json's text model. Raises ValueError if embeddings or layers are missing or do not have the
    sizes in `fields`, or if unquantized weights are not floating-point numbers."""
    decoder = text_prefix(tensors.__contains__).decoder
    name = f"{decoder}.embed_tokens.weight".lstrip(".")
    wrong = f"the weights in {folder} are not those of its config.json"
    if name not in tensors:
        raise ValueError(f"{wrong}: {name} is missing, which {architecture} has")
    for dim, field in enumerate(("vocab_size", "hidden_size")):
        shape, wanted = tensors[name].shape, fields.get(field)
        if len(shape) != 2 or wanted not in (None, shape[dim]):
            raise ValueError(f"{wrong}: {name} has shape {list(shape)}, but {field} is {wanted}")
    layers = f"{decoder}.layers.".lstrip(".")
    _check_layers(tensors, layers, fields, wrong)
    if not fields.get("quantization_config"):
        for name, tensor in tensors.items():
            if name.startswith(layers) and name.endswith("weight") and tensor.dtype not in FLOATS:
                raise ValueError(
                    f"{wrong}: {name} is stored as {tensor.dtype}, so it is quantized, but there is no "
                    "quantization_config; was config.json replaced by the one of the unquantized model?"
                )


def _check_layers(tensors: Mapping[str, Tensor], prefix: str, fields: Mapping[str, Any], wrong: str) -> None:
    count = fields.get("num_hidden_layers")
    if count is None:
        return
    found = {name.removeprefix(prefix).partition(".")[0] for name in tensors if name.startswith(prefix)}
    missing = [number for number in range(count) if str(number) not in found]
    if missing:
        shown = ", ".join(map(str, missing[:_SHOWN])) + (", …" if len(missing) > _SHOWN else "")
        raise ValueError(f"{wrong}: num_hidden_layers is {count}, but layers {shown} have no tensors")


def least_bytes(tensors: Mapping[str, Tensor], fields: Mapping[str, Any], *, dtype: str, quantizes: bool) -> int:
    """The bytes of the decoder's weights in memory, at least: without the LM head, image encoders, and layers behind
    the last one. Floating-point numbers are converted to `dtype`, one of `EngineConfig.dtype`, or to 8 bits if the
    engine `quantizes` the weights."""
    decoder = text_prefix(tensors.__contains__).decoder
    inner = f"{decoder}.".lstrip(".")
    of_float = 1 if quantizes else _BYTES[dtype]
    num_layers = fields.get("num_hidden_layers", 0)
    return sum(
        tensor.size * (of_float if tensor.dtype in FLOATS else ITEM_BYTES.get(tensor.dtype, 0))
        for name, tensor in tensors.items()
        if name.startswith(inner) and _layer_of(name.removeprefix(inner)) < num_layers
    )


def _layer_of(name: str) -> int:
    """The number of the layer that has a tensor; of those beside layers, such as embeddings, -1."""
    parts = name.split(".", 2)
    return int(parts[1]) if parts[0] == "layers" and parts[1].isdigit() else -1
