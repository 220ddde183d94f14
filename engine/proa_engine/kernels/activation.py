"""What a product reads: rows of numbers, or what stands for them in the form that the product asked for."""

import torch

from proa_engine.kernels.few_rows import FewRows, UnnormedRows
from proa_engine.kernels.fp8 import Fp8Form, QuantizedRows

InputForm = Fp8Form | FewRows
Activation = torch.Tensor | QuantizedRows | UnnormedRows
