"""The dtypes of torch that the kernels take: those of parameters, of gradients, and of values in block formats."""

from __future__ import annotations

import torch

from optim_cpu.kernels import DType

DTYPES = {torch.float32: DType.FP32, torch.bfloat16: DType.BF16, torch.float16: DType.FP16}
