"""A model whose frozen weights are bytes: codes of several dtypes in each block, beside floats and adapters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 600
RANK = 2
# The dtypes of codes, and what a code is multiplied by.
STEPS = {
    torch.int8: 1 / 512,
    torch.uint8: 1 / 64,
    torch.float8_e4m3fn: 1 / 2048,
    torch.float8_e5m2: 1 / 2**18,
    torch.int16: 2**-17,
}


class FrozenLinear(nn.Module):
    """x @ W.T in codes of ``dtype``, uint8 with two codes of 4 bits in a byte, plus a trained adapter."""

    def __init__(self, columns: int, rows: int, dtype: torch.dtype) -> None:
        super().__init__()
        packed = columns * rows // 2 if dtype is torch.uint8 else columns * rows
        raw = torch.randint(256, (packed * dtype.itemsize,), dtype=torch.uint8)
        codes = raw.view(dtype) if not dtype.is_floating_point else (torch.randn(packed) * 16).to(dtype)
        shape = (packed,) if dtype is torch.uint8 else (rows, columns)
        self.shape = (rows, columns)
        self.codes = nn.Parameter(codes.view(shape), requires_grad=False)
        # Sizes that end inside an element of any flat tensor, and inside a page.
        self.keep = nn.Parameter(torch.rand(rows) < 0.9, requires_grad=False)
        self.order = nn.Parameter(torch.randperm(rows), requires_grad=False)
        self.scale = nn.Parameter(torch.full((rows, 1), STEPS[dtype]), requires_grad=False)
        self.a = nn.Parameter(torch.randn(RANK, columns) / 8)
        self.b = nn.Parameter(torch.zeros(rows, RANK))

    def weight(self, dtype: torch.dtype) -> Tensor:
        codes: Tensor = self.codes
        if codes.dtype is torch.uint8:
            codes = torch.stack((codes & 15, codes >> 4), dim=1).view(self.shape).to(dtype) - 7.5
        return codes.to(dtype) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        adapted = functional.linear(functional.linear(x, self.a), self.b)
        y = functional.linear(x, self.weight(x.dtype)) + adapted
        return torch.where(self.keep, y, -y)[..., self.order]


class Block(nn.Module):
    def __init__(self, width: int, first: torch.dtype, second: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = FrozenLinear(width, 2 * width + 1, first)
        self.down = FrozenLinear(2 * width + 1, width, second)

    def forward(self, stream: Tensor) -> Tensor:
        hidden: Tensor = self.down(functional.gelu(self.up(self.norm(stream))))
        return stream + hidden


class FrozenModel(nn.Module):
    """Blocks of codes in every dtype of ``STEPS``, a table of bytes in the root, trained embeddings and adapters."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.table = nn.Parameter(
            torch.randint(-128, 128, (16, width), dtype=torch.int8), requires_grad=False
        )
        dtypes = list(STEPS)
        self.blocks = nn.ModuleList(
            Block(width, first, second) for first, second in zip(dtypes, dtypes[1:] + dtypes[:1], strict=True)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64), requires_grad=False)
        self.nothing = nn.Parameter(torch.empty(0, 3, dtype=torch.uint8), requires_grad=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        stream = self.embedding(tokens)
        stream = stream + self.table[: tokens.shape[-1]].to(stream.dtype) / 64
        for block in self.blocks:
            stream = block(stream)
        stream = self.norm(stream) * (self.phase.abs().sum() / 100).to(stream.dtype)
        logits = self.head(stream).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def frozen_model() -> FrozenModel:
    """The same model each time."""
    torch.manual_seed(11)
    return FrozenModel()
