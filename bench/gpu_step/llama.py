"""A Llama in plain torch: what every side trains.

Nothing here knows of a side. Rotary frequencies are computed in each forward, so that the module has parameters and no
buffers. Matrices are drawn as Llama's are, from a normal distribution, by ``reset_parameters``: what builds a model
piece by piece takes the values as soon as a layer is there.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .shape import HEAD, SHARED, Shape

THETA = 10_000.0
DEVIATION = 0.02


class Matrix(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=DEVIATION)


class Words(nn.Embedding):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=DEVIATION)


def rotary(sequence: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [sequence, HEAD]."""
    exponents = torch.arange(0, HEAD, 2, device=device, dtype=torch.float32) / HEAD
    places = torch.arange(sequence, device=device, dtype=torch.float32)
    angles = torch.outer(places, THETA**-exponents).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` is [batch, heads, sequence, HEAD]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        shared = shape.width // SHARED
        self.queries = Matrix(shape.width, shape.width)
        self.keys = Matrix(shape.width, shared)
        self.values = Matrix(shape.width, shared)
        self.output = Matrix(shape.width, shape.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, sequence, _ = x.shape

        def heads(flat: Tensor) -> Tensor:
            return flat.view(batch, sequence, -1, HEAD).transpose(1, 2)

        queries = rotated(heads(self.queries(x)), cos, sin)
        keys = rotated(heads(self.keys(x)), cos, sin).repeat_interleave(SHARED, dim=1)
        values = heads(self.values(x)).repeat_interleave(SHARED, dim=1)
        attention = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        out: Tensor = self.output(attention.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.before_attention = nn.RMSNorm(shape.width, eps=1e-5)
        self.attention = Attention(shape)
        self.before_mlp = nn.RMSNorm(shape.width, eps=1e-5)
        self.gate = Matrix(shape.width, shape.mlp)
        self.up = Matrix(shape.width, shape.mlp)
        self.down = Matrix(shape.mlp, shape.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x), cos, sin)
        inner = self.before_mlp(x)
        out: Tensor = x + self.down(functional.silu(self.gate(inner)) * self.up(inner))
        return out


class Llama(nn.Module):
    """Tokens and what follows them, [batch, sequence] each, to the mean loss. Blocks are recomputed in backward.

    ``reentrant`` is the older kind of checkpointing.
    """

    def __init__(self, shape: Shape, *, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embedding = Words(shape.words, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = Matrix(shape.width, shape.words)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = rotary(tokens.shape[1], x.device, x.dtype)
        for block in self.blocks:
            # Nothing is drawn at random in a block.
            x = checkpoint(block, x, cos, sin, use_reentrant=self.reentrant, preserve_rng_state=False)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
