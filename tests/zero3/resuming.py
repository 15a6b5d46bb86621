"""A run that stops, is saved, and goes on elsewhere, against one that does not stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

STREAMED: dict[str, Any] = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}
MIXED: dict[str, Any] = {"offload_param": "nvme", "offload_optimizer": "nvme", "host_budget": "400KiB"}
ON_CPU: dict[str, Any] = {"offload_param": "cpu", "offload_optimizer": "cpu"}
ROWS, WIDTH = 60, 32


class Model(nn.Module):
    """Dropout, running statistics, a tied head, a frozen table, a scalar and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 3 * WIDTH), nn.Tanh(), nn.Dropout(0.2), nn.Linear(3 * WIDTH, WIDTH)
            )
            for _ in range(3)
        )
        self.statistics = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.frozen = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6, requires_grad=False)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("passing", torch.zeros(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x)
        x = self.statistics(x @ self.frozen) * self.scale
        return functional.cross_entropy(self.head(x).float(), (tokens * 7 + 1) % ROWS)


def tokens(number: int) -> Tensor:
    return torch.randint(ROWS, (24,), generator=torch.Generator().manual_seed(number))


def train(engine: Any, micro_batches: range) -> list[float]:
    """The losses of these micro-batches."""
    losses = []
    for number in micro_batches:
        loss = engine(tokens(number))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def moments(engine: Any) -> dict[str, Tensor]:
    trained = [name for name, param in engine.module.named_parameters() if param.requires_grad]
    return {
        f"{kind} of {name}": engine.get_fp32_state(name, kind)
        for name in trained
        for kind in engine.state_names
    }


@dataclass
class Left:
    """All that a run leaves."""

    tensors: dict[str, Tensor]
    rest: dict[str, Any]
    losses: list[float] = field(default_factory=list)

    @classmethod
    def by(cls, engine: Any, losses: list[float] | None = None) -> Left:
        masters = {f"master of {name}": master for name, master in engine.master_state_dict().items()}
        weights = {name: value.clone() for name, value in engine.state_dict().items()}
        rest = {
            "options": [
                {name: value for name, value in group.items() if name != "params"}
                for group in engine.optimizer.param_groups
            ],
            "scale": engine.loss_scale.state_dict(),
            "steps": (engine.global_steps, engine.skipped_steps, engine.micro_steps),
            "steps of parameters": dict(engine.optimizer.steps),
            "norm": repr(engine.get_global_grad_norm()),  # perhaps not a number
            "schedule": None if engine.lr_scheduler is None else engine.lr_scheduler.get_last_lr(),
        }
        return cls({**weights, **masters, **moments(engine)}, rest, losses or [])

    def differences(self, other: Left) -> list[str]:
        """What is not the same to the bit."""
        names = {*self.tensors, *other.tensors}
        differences = sorted(
            name for name in names if not _same(self.tensors.get(name), other.tensors.get(name))
        )
        differences += [name for name in self.rest if self.rest[name] != other.rest[name]]
        if self.losses != other.losses:
            differences.append(f"losses {self.losses} and {other.losses}")
        return differences


def _same(first: Tensor | None, other: Tensor | None) -> bool:
    if first is None or other is None or first.shape != other.shape or first.dtype != other.dtype:
        return False
    return first.contiguous().view(-1).view(torch.uint8).equal(other.contiguous().view(-1).view(torch.uint8))


Begin = Callable[[], Any]
Train = Callable[[Any, range], list[float]]


def straight(begin: Begin, steps: int, train: Train = train) -> Left:
    """``begin`` makes an engine; its model's first values, and random numbers, are those of the seed at the call."""
    torch.manual_seed(1)
    engine = begin()
    torch.manual_seed(2)
    outcome = Left.by(engine, train(engine, range(steps)))
    engine.close()
    return outcome


def interrupted(
    begin: Begin,
    steps: int,
    save_at: int,
    directory: Path,
    *,
    train: Train = train,
    elsewhere: Begin | None = None,
    meanwhile: int = 0,
) -> Left:
    """Saved after ``save_at`` of the steps, and gone on with by another engine, ``elsewhere``.

    Saved in the background, if ``meanwhile``, while that many further steps are trained in vain.
    """
    torch.manual_seed(1)
    engine = begin()
    torch.manual_seed(2)
    losses = train(engine, range(save_at))
    saving = engine.save_checkpoint(directory, background=meanwhile > 0)
    train(engine, range(save_at, save_at + meanwhile))
    saving.wait()
    engine.close()
    torch.manual_seed(99)  # another model, and other random numbers
    engine = (elsewhere or begin)()
    path, _ = engine.load_checkpoint(directory)
    assert path == str(saving.path)
    outcome = Left.by(engine, losses + train(engine, range(save_at, steps)))
    engine.close()
    return outcome


def after_snapshot(
    begin: Begin,
    steps: int,
    save_at: int,
    directory: Path,
    *,
    train: Train = train,
    elsewhere: Begin | None = None,
) -> Left:
    """What a run leaves that goes on from the second snapshot of another one, which has trained beyond it."""
    torch.manual_seed(1)
    engine = begin()
    torch.manual_seed(2)
    losses = train(engine, range(save_at - 1))
    engine.snapshot_state(directory)
    losses += train(engine, range(save_at - 1, save_at))
    path = engine.snapshot_state(directory, {"at": save_at})
    # These steps write to the same swap files.
    train(engine, range(save_at, save_at + 3))
    engine.close()
    torch.manual_seed(99)  # another model, and other random numbers
    engine = (elsewhere or begin)()
    assert engine.load_checkpoint(directory) == (str(path), {"at": save_at})
    outcome = Left.by(engine, losses + train(engine, range(save_at, steps)))
    engine.close()
    return outcome
