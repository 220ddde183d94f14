"""AutoAWQ's `quantization_config`."""

from collections.abc import Mapping
from typing import Any

from proa_engine.models.quantization.fields import entries, group_size, only
from proa_engine.models.quantization.formats import AwqFormat, Quantization


def read_awq(stored: Mapping[str, Any]) -> Quantization:
    only("bits", stored.get("bits"), (4,))
    only("version", str(stored.get("version", "gemm")).lower(), ("gemm",))
    only("zero_point", stored.get("zero_point", True), (True,))
    return Quantization(AwqFormat(group_size(stored))).except_for(*entries(stored, "modules_to_not_convert"))
