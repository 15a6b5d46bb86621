"""Kinds of tensors that autograd saves, and functions that change them: as without moved activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zero3.conftest import same_bits
from tests.zero3.passes.test_moved_activations import NVME, moved_by, start, update
from zero3.engine.engine import Engine
from zero3.passes import moved_activations
from zero3.passes.kept_activations import FixedRoom

__all__ = ["start"]


class Between(nn.Module):
    """``function`` between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.function = function

    def forward(self, scale: float) -> Tensor:
        rows = torch.linspace(-scale, scale, 32 * 64).view(32, 64)
        result: Tensor = self.last(self.function(self.first(rows))).square().mean()
        return result


def conjugated(stream: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(stream).conj()
    return torch.fft.irfft(spectrum * spectrum.sin(), n=64)


def negated(stream: Tensor) -> Tensor:
    part = torch.complex(stream, stream.sin()).conj().imag
    assert part.is_neg()
    return part * stream


def sparse(stream: Tensor) -> Tensor:
    return torch.sparse.mm((stream @ stream.T > 0).float().to_sparse(), stream)


def compressed(stream: Tensor) -> Tensor:
    return (stream @ stream.T > 0).float().to_sparse_csr() @ stream


def nested(stream: Tensor) -> Tensor:
    parts = torch.nested.as_nested_tensor([stream[:10], stream[10:]])
    return torch.nested.to_padded_tensor(torch.relu(parts * parts), 0.0).view(-1, 64)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("function", [conjugated, negated, sparse, compressed, nested])
def test_the_bits_are_those_without_moved_activations(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, function: Callable[[Tensor], Tensor]
) -> None:
    monkeypatch.setattr(moved_activations, "SMALLEST", 4096)
    states = []
    for place in ("device", "nvme"):
        engine = start(Between(function), activations=place, activation_budget="64KiB", **NVME)
        for scale in (1.0, 2.0):
            update(engine, scale)
        states.append(engine.state_dict())
    assert not same_bits(*states)
    assert moved_by(engine).copied_bytes > 0


class Overwriting(torch.autograd.Function):
    """Its backward uses the memory of the tensor that it has saved, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor) -> Tensor:
        ctx.save_for_backward(stream)
        return stream * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (stream,) = ctx.saved_tensors
        result: Tensor = stream.mul_(gradient)
        return result


@pytest.mark.parametrize("place", ["host", "nvme", "auto"])
def test_a_tensor_that_backward_has_changed_is_refused_afterwards(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Another function saved it, or the same one goes backward again: torch refuses both."""

    def shared(stream: Tensor) -> Tensor:
        stream = stream.sin()
        # Backward goes through the square after it has gone through the other function.
        square = stream * stream
        return square + Overwriting.apply(stream)  # type: ignore[no-any-return, no-untyped-call]

    def alone(stream: Tensor) -> Tensor:
        return Overwriting.apply(stream.sin())  # type: ignore[no-any-return, no-untyped-call]

    monkeypatch.setattr(moved_activations, "SMALLEST", 4096)
    settings = {"activations": place, "activation_budget": "64KiB", **NVME}
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .*\(32, 64\)\], at version 1"):
        update(start(Between(shared), **settings), 1.0)
    plain, engine = start(Between(alone)), start(Between(alone), **settings)
    assert update(engine, 1.0) == update(plain, 1.0)
    assert not same_bits(engine.state_dict(), plain.state_dict())
    loss = engine(1.0)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("place", ["nvme", "auto"])
def test_an_engine_in_the_forward_of_another_one_reads_its_own_bytes(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Torch calls the hooks of the inner engine, which pass on what they get to those of the outer one."""
    monkeypatch.setattr(moved_activations, "SMALLEST", 4096)
    states = []
    for activations in ("device", place):
        settings = {"activations": activations, "activation_budget": "16KiB", **NVME}
        inner = start(nn.Sequential(*(Between(torch.tanh).first for _ in range(4))), **settings)
        outer = start(Between(lambda stream, inner=inner: inner(stream).sin()), **settings)
        for each in (inner, outer):
            moved = each._schedule._moved
            if moved is not None and moved._kept is not None:
                monkeypatch.setattr(moved._kept, "_room", FixedRoom(8192))
        for scale in (1.0, 2.0):
            update(outer, scale)
        states.append(outer.state_dict())
    assert not same_bits(*states)
    # Reads of the inner one would not wait for writes of the outer one.
    assert moved_by(outer).read_bytes == moved_by(outer).written_bytes > 0 == moved_by(inner).read_bytes
