"""The all-to-all of Ulysses: from some tokens of all heads to all tokens of some heads, and back.

    rank 0: tokens 0-3 of heads 0-3        tokens_to_heads        rank 0: tokens 0-7 of heads 0-1
    rank 1: tokens 4-7 of heads 0-3   ───────────────────────►    rank 1: tokens 0-7 of heads 2-3
                                      ◄───────────────────────
                                           heads_to_tokens

Ulysses: Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
Transformer Models" (2023). A rank sends (n - 1) / n of each tensor, n being the number of ranks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tiering import comm
from tiering.errors import ConfigError

HEADS, TOKENS = 1, 2
"""Dimensions of queries, keys and values of shape (batch, heads, tokens, head size)."""


def tokens_to_heads(*tensors: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """(batch, heads, tokens of this rank, size) of each tensor -> (batch, heads / n, all tokens, size).

    ``n`` is the number of ranks in ``group``, and divides the heads of each tensor. Rank i gets the i-th part of the
    heads. All ranks of ``group`` make the call, with equal shapes. The backward is the inverse.
    """
    return _exchanged(group, HEADS, TOKENS, tensors)


def heads_to_tokens(output: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """(batch, all tokens, heads of this rank, size) of the result of attention -> (batch, tokens / n, all heads, size).

    The inverse of ``tokens_to_heads``, but for the order of dimensions, which is that of transformers.
    """
    return _exchanged(group, 1, 2, (output,))[0]


def _exchanged(
    group: dist.ProcessGroup, split: int, join: int, tensors: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    # Autocast may leave queries and values in other dtypes: one collective holds elements of one size.
    if len({tensor.dtype for tensor in tensors}) > 1:
        return tuple(_exchanged(group, split, join, (tensor,))[0] for tensor in tensors)
    exchanged: tuple[Tensor, ...] = _Exchange.apply(  # type: ignore[no-untyped-call] # torch's
        group, split, join, *tensors
    )
    return exchanged


class _Exchange(torch.autograd.Function):
    """Cuts dimension ``split`` of each tensor into a part for each rank, and joins what arrives along ``join``.

    All tensors travel in one collective. The order of collectives in a backward is therefore the reverse of that of the
    forward, and the same on all ranks, whichever gradient autograd computes first.
    """

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, split: int, join: int, *tensors: Tensor) -> Any:
        ctx.way = group, split, join
        return _exchange(group, split, join, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        group, split, join = ctx.way
        return None, None, None, *_exchanged(group, join, split, gradients)


def _exchange(
    group: dist.ProcessGroup, split: int, join: int, tensors: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    ranks = dist.get_world_size(group)
    for tensor in tensors:
        if tensor.shape[split] % ranks:
            raise ConfigError(
                f"dimension {split} of a tensor of shape {tuple(tensor.shape)} cannot be divided among the {ranks}"
                f" ranks of a sequence group; choose sizes that {ranks} divides"
            )
    # (ranks, ...): the part of each rank is contiguous in the buffer that is sent.
    parts = [tensor.unflatten(split, (ranks, -1)).movedim(split, 0) for tensor in tensors]
    sent = torch.cat([part.reshape(ranks, -1) for part in parts], dim=1)
    received = torch.empty_like(sent)
    comm.all_to_all_single(received, sent, group=group)
    arrived = received.split([math.prod(part.shape[1:]) for part in parts], dim=1)
    return tuple(
        # Rank i has sent the i-th part of the joined dimension.
        piece.view(part.shape).movedim(0, join).flatten(join, join + 1)
        for piece, part in zip(arrived, parts, strict=True)
    )
