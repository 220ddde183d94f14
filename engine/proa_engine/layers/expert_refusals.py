"""What loading and the checks before the start refuse in the same words. Does not import torch."""


def no_stacked_experts(name: str) -> ValueError:
    """`name`: of the tensor, or of the module."""
    return ValueError(
        f"{name}: quantized experts in one tensor are supported only in gpt-oss's mxfp4; take a version of the model "
        "whose experts have their own tensors, or the unquantized one with quantization fp8"
    )
