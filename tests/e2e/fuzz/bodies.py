"""What blocks of random models do: each is a module of the same shape, whose sizes come from its width alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from optim_cpu.formats import quantized
from zero3.building.quantized_linear import QuantizedLinear


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(functional.gelu(self.up(self.norm(x))))
        return result


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.projections, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projections(self.norm(x)).chunk(3, -1)
        result: Tensor = self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return result


class Routed(nn.Module):
    """Experts chosen by the data: those that are not get no gradient. A loss on the routing stays on the module."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(3)
        )
        self.balance: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).float().softmax(-1)
        self.balance = shares.mean((0, 1)).square().sum()
        chosen = int(shares.mean((0, 1)).argmax())
        y: Tensor = self.experts[chosen](x) * shares[..., chosen : chosen + 1].to(x.dtype)
        if float(shares[0, 0, 0]) > 0.35:
            y = y + self.experts[0](x) * shares[..., :1].to(x.dtype)
        return y


class FrozenExperts(nn.Module):
    """Frozen experts, one for each token, and a trained router."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4)).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).float().softmax(-1)
        share, chosen = shares.max(-1)
        y = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            mine = (chosen == expert).unsqueeze(-1)
            y = y + torch.where(mine, self.experts[expert](x), 0).to(x.dtype)
        return y * share.unsqueeze(-1).to(x.dtype)


class FusedExperts(nn.Module):
    """As ``FrozenExperts``, in two parameters like those of transformers, which are used in the ways that it has."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 4)
        self.experts = Fused(4, width, grouped=width != 24)

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = self.gate(x).float().softmax(-1).max(-1)
        y: Tensor = self.experts(x.flatten(0, -2), chosen.flatten()).view(x.shape)
        return y * share.unsqueeze(-1).to(x.dtype)


class Fused(nn.Module):
    def __init__(self, experts: int, width: int, *, grouped: bool) -> None:
        super().__init__()
        self.num_experts, self.is_transposed, self.has_gate = experts, False, False
        self.grouped = grouped
        self.up_proj = nn.Parameter(torch.randn(experts, width, width) / width**0.5, requires_grad=False)
        self.down_proj = nn.Parameter(torch.randn(experts, width, width) / width**0.5, requires_grad=False)

    def forward(self, rows: Tensor, chosen: Tensor) -> Tensor:
        if self.grouped:
            order = chosen.argsort(stable=True)
            ends = torch.bincount(chosen, minlength=self.num_experts).cumsum(0).to(torch.int32)
            y = torch._grouped_mm(
                rows[order].to(self.up_proj.dtype), self.up_proj.transpose(-2, -1), offs=ends
            )
            y = torch._grouped_mm(functional.silu(y), self.down_proj.transpose(-2, -1), offs=ends)
            return y[order.argsort()]
        y = torch.zeros_like(rows)
        for expert in chosen.unique():
            (mine,) = torch.where(chosen == expert)
            hidden = functional.silu(functional.linear(rows[mine], self.up_proj[expert]))
            y = y.index_add(0, mine, functional.linear(hidden, self.down_proj[expert]).to(y.dtype))
        return y


class Bare(nn.Module):
    """Parameters without modules."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Parameter(torch.randn(width, width + 8) / 8)
        self.out = nn.Parameter(torch.randn(width + 8, width) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.into) @ self.out


class Stateful(nn.Module):
    """A buffer follows the inputs in training, and takes part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / 8)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.detach().float().mean((0, 1)), 0.1)
        return (x - self.mean.to(x.dtype)) @ self.weight


class StatefulBase(nn.Module):
    """The same before a frozen layer, so that what autograd saves last is a weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.detach().float().mean((0, 1)), 0.1)
        result: Tensor = self.base(x - self.mean.to(x.dtype))
        return result


class LowRank(nn.Module):
    """A frozen layer with an adapter beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, width) / 8)
        self.b = nn.Parameter(torch.randn(width, 2) / 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + x @ self.a.T @ self.b.T
        return result


class Coded(nn.Module):
    """A frozen layer of bytes, two codes of 4 bits in each, whose outputs go where frozen integers say; an adapter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(2, width) / 8)
        self.b = nn.Parameter(torch.randn(width, 2) / 8)
        # One byte more than codes: it ends inside an element of a flat tensor.
        codes = torch.randint(256, (width * width // 2 + 1,), dtype=torch.uint8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.order = nn.Parameter(torch.randperm(width), requires_grad=False)
        self.scale = nn.Parameter(torch.full((width, 1), 1 / 32), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        codes = torch.stack((self.codes & 15, self.codes >> 4), dim=1).flatten()[: width * width]
        weight = (codes.view(width, width).to(x.dtype) - 7.5) * self.scale
        result: Tensor = functional.linear(x, weight)[..., self.order % width] + x @ self.a.T @ self.b.T
        return result


class Quantised(nn.Module):
    """A frozen layer in a block format, which depends on the width, with an adapter beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        form = quantized({16: "nf4", 24: "int8"}.get(width, "fp8"), block_size=32)
        values = torch.randn(width, 32) / 8
        self.base = QuantizedLinear(32, width, form).requires_grad_(False)
        with torch.no_grad():
            for param, encoded in zip(
                (self.base.weight, self.base.weight_scales), form.encode(values), strict=True
            ):
                param.copy_(encoded.flatten())
        self.a = nn.Parameter(torch.randn(2, width) / 8)
        self.b = nn.Parameter(torch.randn(width, 2) / 8)

    def forward(self, x: Tensor) -> Tensor:
        padded = functional.pad(x, (0, 32 - x.shape[-1]))
        result: Tensor = self.base(padded) + x @ self.a.T @ self.b.T
        return result


class _Product(torch.autograd.Function):
    """x @ weight, whose backward reads the parameter from where forward has kept it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        gradient = gradient.to(x.dtype)  # another one under autocast
        return gradient @ ctx.weight.T, torch.einsum("bsi,bso->io", x, gradient)


class ByFunction(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Product.apply(x, self.weight)
        return result


class Normalised(nn.Module):
    """Running statistics, in buffers that torch updates."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.inner(x).transpose(1, 2)).transpose(1, 2)
        return result


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.cell(x)[0]
        return result


BODIES: dict[str, Any] = {
    "mlp": Mlp,
    "attention": Attention,
    "routed": Routed,
    "frozen experts": FrozenExperts,
    "fused experts": FusedExperts,
    "bare": Bare,
    "stateful": Stateful,
    "stateful base": StatefulBase,
    "low rank": LowRank,
    "coded": Coded,
    "quantised": Quantised,
    "by function": ByFunction,
    "normalised": Normalised,
    "recurrent": Recurrent,
    "nested": None,  # of blocks: see models.Nested
}
IN_CHUNKS = (
    "mlp", "attention", "frozen experts", "fused experts", "bare", "low rank", "coded", "quantised", "by function",
    "recurrent",
)  # fmt: skip
"""Kinds whose rows are independent, and which keep nothing outside of their outputs."""
INNER = ("mlp", "bare", "routed", "frozen experts", "fused experts")
"""Kinds of blocks inside a block."""
