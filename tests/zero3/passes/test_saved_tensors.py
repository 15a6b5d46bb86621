"""Backward may enter a group from anywhere: what autograd saved is there when it is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tiering.errors import EngineStateError
from tiering.storage import arena

STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}
WIDTH = 32


@dataclass
class Opaque:
    """An output that pytree does not know."""

    hidden: Tensor


class Block(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(2, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, mixed: nn.Module | None) -> Any:
        hidden = torch.tanh(self.up(x))
        if mixed is not None:
            hidden = mixed(hidden)
        out = x + self.down(hidden)
        # Computed after the output, so backward comes here first; a view, a leaf and a matrix are saved.
        self.extra = self.up(self.norm(torch.tanh(x) * self.scale[0])).float().pow(2).mean()
        return Opaque(out) if self.way == "opaque output" else out


class Mixer(nn.Module):
    """Larger than a block, so a group of its own, and called by one block in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.Parameter(torch.randn(40, WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.tables[0]) * self.tables[1, 0]


class Model(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.mixer = Mixer()
        self.blocks = nn.ModuleList(Block(way) for _ in range(3))
        self.caught: Tensor | None = None
        if way == "caught by a hook":
            self.blocks[1].up.register_forward_hook(self.catch)

    def catch(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.caught = output

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            mixed = self.mixer if self.way == "called by a block" and index == 1 else None
            recompute = self.way == "checkpointed"
            x = checkpoint(block, x, None, use_reentrant=False) if recompute else block(x, mixed)
            if isinstance(x, Opaque):
                x = x.hidden
        if self.caught is not None:
            return self.caught.float().pow(2).mean()
        loss = x.float().pow(2).mean()
        if self.way == "loss on the module":
            extras = [block.extra for block in self.blocks]
            assert all(isinstance(extra, Tensor) for extra in extras)
            loss = torch.stack(extras).sum()  # type: ignore[arg-type]
        return loss


WAYS = [
    "plain",
    "loss on the module",
    "opaque output",
    "caught by a hook",
    "called by a block",
    "checkpointed",
]


@pytest.mark.parametrize("way", WAYS)
def test_placement_changes_no_bit_whichever_way_backward_takes(
    start: Callable[..., Any], differing: Callable[..., list[str]], way: str
) -> None:
    def run(**placement: Any) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(6)
        engine = start(Model(way), accumulation=1, threshold=0, **placement)
        generator = torch.Generator().manual_seed(1)
        losses = []
        for _ in range(3):
            loss = engine(torch.randn(4, WIDTH, generator=generator).bfloat16().requires_grad_())
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        assert all(group.residency.name in ("RESIDENT", "SHARDED", "FETCHING") for group in engine._groups)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        return losses, engine.master_state_dict()

    (losses, masters), (same_losses, same) = run(), run(**STREAMED)
    assert same_losses == losses
    assert differing(same, masters) == []
    assert len({*losses}) == 3, "it does not train"


def test_checkpointing_still_saves_no_activations(start: Callable[..., Any]) -> None:
    """The hooks of checkpointing get every tensor that is not a parameter's."""
    ran = []
    engine = start(Model("checkpointed"), accumulation=1, threshold=0, **STREAMED)
    engine.module.blocks[0].up.register_forward_hook(lambda *_: ran.append(1))
    loss = engine(torch.ones(4, WIDTH, dtype=torch.bfloat16, requires_grad=True))
    calls = len(ran)
    engine.backward(loss)
    assert len(ran) > calls, "nothing was recomputed: the activations were saved"


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_needs_no_more_room_than_the_plan_counts(
    start: Callable[..., Any],
    differing: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    reentrant: bool,
) -> None:
    """A later group is live when blocks are recomputed, several at once: it has to go first."""
    monkeypatch.setattr(arena, "STARVED_AFTER_SECONDS", 2.0)

    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.head = nn.Linear(WIDTH, 3 * WIDTH)

        def several(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x)) * x
            return x

        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.several, x, use_reentrant=reentrant)
            logits: Tensor = self.head(x)
            return logits.float().pow(2).mean()

    def run(**options: Any) -> dict[str, Tensor]:
        torch.manual_seed(6)
        engine = start(Headed(), accumulation=1, threshold=0, prefetch=0, **options)
        for _ in range(2):
            x = torch.ones(4, WIDTH, dtype=torch.bfloat16, requires_grad=True)
            engine.backward(engine(x))
            engine.step()
        masters: dict[str, Tensor] = engine.master_state_dict()
        return masters

    assert differing(run(), run(**STREAMED)) == []


def test_gradients_of_gradients_are_refused(start: Callable[..., Any]) -> None:
    engine = start(Model("plain"), accumulation=1, threshold=0, **STREAMED)
    x = torch.ones(4, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(EngineStateError, match="create_graph"):
        torch.autograd.grad(engine(x), x, create_graph=True)
    (gradient,) = torch.autograd.grad(engine(x), x)
    assert torch.isfinite(gradient).all()


def test_an_interrupt_in_forward_leaves_no_hooks(start: Callable[..., Any]) -> None:
    engine = start(Model("plain"), accumulation=1, threshold=0, **STREAMED)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = engine.module.blocks[1].down.register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        engine(torch.ones(4, WIDTH, dtype=torch.bfloat16))
    handle.remove()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
