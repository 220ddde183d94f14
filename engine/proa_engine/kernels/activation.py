"""The input of a matrix product: a tensor [T, in_features], or the representation that the product asks for."""

import torch

from proa_engine.kernels.fp8 import Fp8Form, QuantizedRows
from proa_engine.kernels.skinny_gemm import SkinnyGemm, UnnormedRows

InputForm = Fp8Form | SkinnyGemm
Activation = torch.Tensor | QuantizedRows | UnnormedRows
