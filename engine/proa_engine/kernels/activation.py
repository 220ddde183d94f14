"""What a product reads: rows of numbers, or what stands for them in the form that the product asked for."""

import torch

from proa_engine.kernels.fp8 import Fp8Form, QuantizedRows
from proa_engine.kernels.skinny_gemm import SkinnyGemm, UnnormedRows

InputForm = Fp8Form | SkinnyGemm
Activation = torch.Tensor | QuantizedRows | UnnormedRows
