"""A byte-level GPT in plain PyTorch, without any code for tiers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_up = nn.Linear(width, 4 * width)
        self.mlp_down = nn.Linear(4 * width, width)

    def forward(self, stream: Tensor) -> Tensor:
        """``stream`` and the result: [batch, sequence, width]."""
        batch, sequence, width = stream.shape
        heads = (batch, sequence, 3, self.heads, width // self.heads)
        query, key, value = self.qkv(self.attention_norm(stream)).view(heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        stream = stream + self.attention_out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        hidden: Tensor = self.mlp_down(functional.gelu(self.mlp_up(self.mlp_norm(stream))))
        return stream + hidden


class GPT(nn.Module):
    """Predicts the next byte. The weights have the default initialization of PyTorch's layers."""

    def __init__(self, *, width: int, layers: int, heads: int, sequence: int) -> None:
        super().__init__()
        self.sequence = sequence
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Mean cross entropy in nats for int64 ``tokens`` and ``targets`` [batch, sequence].

        Without ``targets``: the logits, fp32 [batch, sequence, VOCABULARY].
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        stream = self.embedding(tokens) + self.position(positions)
        for block in self.blocks:
            stream = block(stream)
        logits: Tensor = self.head(self.norm(stream)).float()
        if targets is None:
            return logits
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
