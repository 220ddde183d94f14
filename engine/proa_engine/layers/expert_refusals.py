"""Formats that matrices can have, but not those of experts: the errors of the checks before the start and of loading.
Does not import torch. `prefix` is the name of a matrix.
"""


def unordered_experts(prefix: str, quantization: str) -> ValueError:
    return ValueError(
        f"{prefix}: experts quantized by {quantization} with desc_act or actorder group, so that the inputs of a group "
        "do not lie together, are not supported"
    )


def asymmetric_experts(prefix: str) -> ValueError:
    return ValueError(
        f"{prefix}: experts with asymmetric activations in 8-bit integers are not supported; supported: symmetric ones"
    )
