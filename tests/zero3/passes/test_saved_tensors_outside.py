"""Saved-tensor hooks of others around a group's tensors do what they would do if no group moved."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

WIDTH = 32
STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "host": {"offload_param": "cpu", "offload_optimizer": "cpu"},
    "nvme": STREAMED,
    "nvme without prefetch": {**STREAMED, "prefetch": 0},
}


class Adapted(nn.Module):
    """A block that changes a buffer before it uses a frozen weight, of which backward needs the weight alone."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.mean: Tensor
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.trained(x))
        with torch.no_grad():
            self.mean.lerp_(hidden.mean(0).to(self.mean.dtype), 0.25)
            self.calls += 1
        return torch.as_tensor(x + self.frozen(hidden))


class Routed(nn.Module):
    """A block that chooses between experts by a buffer that each forward of it changes: each call takes another way."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        expert = self.experts[int(self.calls) % 3]
        self.calls += 1
        return torch.as_tensor(x + torch.tanh(expert(torch.sin(x))))


class Around(nn.Module):
    """Calls each block under a checkpoint of its own, all blocks under one, or both."""

    def __init__(self, block: Callable[[], nn.Module], ways: frozenset[str]) -> None:
        super().__init__()
        self.ways = ways
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if "each" in self.ways else block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.body, x, use_reentrant=False) if "all" in self.ways else self.body(x)
        return torch.as_tensor(self.head(x).float().pow(2).mean())


@pytest.fixture
def compare(start: Callable[..., Any], differing: Callable[..., list[str]]) -> Callable[..., list[float]]:
    """Trains a model at every placement; weights, buffers and losses are to be the same to the bit."""

    def train(
        model: Callable[[], nn.Module],
        hooks: Callable[[], AbstractContextManager[Any]],
        retain: bool,
        **placement: Any,
    ) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
        torch.manual_seed(11)
        engine = start(model(), accumulation=1, threshold=0, precision="fp32", **placement)
        generator = torch.Generator().manual_seed(2)
        losses = []
        for _ in range(3):
            with hooks():
                loss = engine(torch.randn(4, WIDTH, generator=generator).requires_grad_())
            losses.append(loss.item())
            if retain:
                engine.backward(loss, retain_graph=True)
            engine.backward(loss)
            engine.step()
        state = {name: value.clone() for name, value in engine.module.state_dict().items()}
        return losses, state, engine.master_state_dict()

    def compare(
        model: Callable[[], nn.Module],
        hooks: Callable[[], AbstractContextManager[Any]] = nullcontext,
        *,
        retain: bool = False,
    ) -> list[float]:
        losses, state, masters = train(model, hooks, retain)
        for name, placement in PLACEMENTS.items():
            same_losses, same_state, same_masters = train(model, hooks, retain, **placement)
            assert same_losses == losses, name
            assert differing(same_state, state) == [], name
            assert differing(same_masters, masters) == [], name
        assert len({*losses}) == 3, "it does not train"
        return losses

    return compare


@pytest.mark.parametrize("ways", ["each", "all", "each all"])
def test_a_recomputation_changes_buffers_alike_in_every_placement(
    compare: Callable[..., list[float]], ways: str
) -> None:
    compare(lambda: Around(Adapted, frozenset(ways.split())))


@pytest.mark.parametrize("ways", ["each", "all", "each all"])
def test_a_recomputation_that_takes_another_way_gives_the_same_gradients_in_every_placement(
    compare: Callable[..., list[float]], ways: str
) -> None:
    compare(lambda: Around(Routed, frozenset(ways.split())), retain=True)


class Halving(saved_tensors_hooks):
    """Keeps what autograd saves, weights too, at half the precision."""

    def __init__(self) -> None:
        super().__init__(lambda tensor: tensor.bfloat16(), lambda packed: packed.float())


class Lazy(saved_tensors_hooks):
    """Keeps tensors as they are, and reads them when they are unpacked."""

    def __init__(self) -> None:
        super().__init__(lambda tensor: tensor, lambda tensor: tensor * 0.5)


@pytest.mark.parametrize("hooks", [Halving, Lazy, save_on_cpu])
def test_hooks_of_others_change_weights_alike_in_every_placement(
    compare: Callable[..., list[float]], hooks: type[saved_tensors_hooks]
) -> None:
    plain = compare(lambda: Around(Adapted, frozenset()))
    changed = compare(lambda: Around(Adapted, frozenset()), hooks)
    assert (changed == plain) == (hooks is save_on_cpu)


def test_save_on_cpu_copies_no_weight(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[tuple[int, ...]] = []

    class Watching(save_on_cpu):
        def __init__(self) -> None:
            super().__init__()
            pack = self.pack_hook

            def pack_to_cpu(tensor: Tensor) -> Any:
                saved.append(tuple(tensor.shape))
                return pack(tensor)

            pack_to_cpu.__qualname__ = pack.__qualname__
            self.pack_hook = pack_to_cpu

    engine = start(Around(Adapted, frozenset()), accumulation=1, threshold=0, precision="fp32", **STREAMED)
    with Watching():
        loss = engine(torch.randn(4, WIDTH).requires_grad_())
    engine.backward(loss)
    engine.step()
    assert (4, WIDTH) in saved
    assert (WIDTH, WIDTH) not in saved


class Peeking(nn.Module):
    """Reads a weight of a later block at its beginning: backward needs it again when its gradient is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(nn.functional.linear(x, self.blocks[1].weight.detach()))  # type: ignore[union-attr]
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Peeking()

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(checkpoint(self.body, x, use_reentrant=False))


def test_a_recomputed_weight_that_backward_has_stepped_is_refused(start: Callable[..., Any]) -> None:
    engine = start(
        Checkpointed(),
        accumulation=1,
        threshold=0,
        precision="fp32",
        step_in_backward=True,
        clip=0,
        **STREAMED,
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(engine(torch.randn(4, WIDTH).requires_grad_()).pow(2).mean())
