"""`quantization_config` of 8-bit floats as DeepSeek, Qwen and vLLM's own quantizer write them."""

from collections.abc import Mapping
from typing import Any

from proa_engine.models.quantization.fields import entries, only
from proa_engine.models.quantization.formats import BlockFp8Format, Format, Fp8Format, Quantization


def read_fp8(stored: Mapping[str, Any]) -> Quantization:
    ignored = entries(stored, "modules_to_not_convert", "ignored_layers")
    return Quantization(_format(stored)).except_for(*ignored)


def _format(stored: Mapping[str, Any]) -> Format:
    """128 x 128 blocks if `weight_block_size` is set, else one scale for each matrix."""
    only("activation_scheme", stored.get("activation_scheme", "dynamic"), ("dynamic", "static"))
    only("fmt", stored.get("fmt", "e4m3"), ("e4m3",))
    block = stored.get("weight_block_size")
    if block is None:
        return Fp8Format("tensor", static=stored.get("activation_scheme") == "static")
    only("weight_block_size", list(block), ([128, 128],))
    only("activation_scheme", stored.get("activation_scheme", "dynamic"), ("dynamic",))
    return BlockFp8Format("weight_scale_inv")
