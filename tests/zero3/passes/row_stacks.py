"""Stacks of blocks for the tests of chunks of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zero3.conftest import Block
from zero3.engine.engine import Engine

WIDTH, SEQUENCE, ROWS = 16, 8, 5
NVME = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False, "threshold": 0}
Start = Callable[..., Engine]


class Counted(Block):
    """Notes the rows of each call of its forward."""

    rows: ClassVar[list[int]] = []

    def forward(self, stream: Tensor) -> Tensor:
        Counted.rows.append(len(stream))
        return super().forward(stream)


class Stack(nn.Module):
    """Blocks, and a loss that is a sum over rows. Outside of the blocks, no operation joins rows."""

    def __init__(self, make: Callable[[], nn.Module] = lambda: Counted(WIDTH), blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(blocks))
        self.checkpoints = "no"

    def forward(self, stream: Tensor, *args: Any) -> Tensor:
        for block in self.blocks:
            if self.checkpoints == "no":
                stream = block(stream, *args)
            else:
                stream = checkpoint(block, stream, *args, use_reentrant=self.checkpoints == "reentrant")
        return stream.float().square().sum() / 64


@pytest.fixture
def begin(start: Start) -> Callable[..., Engine]:
    """``begin(make, block_rows=...)`` makes an engine of a stack of blocks with the same first values."""

    def initialize(
        make: Callable[[], nn.Module] | None = None, *, checkpoints: str = "no", **options: Any
    ) -> Engine:
        torch.manual_seed(3)
        model = Stack() if make is None else Stack(make)
        model.checkpoints = checkpoints
        options = {"precision": "fp32", "accumulation": 1, "clip": 0.0} | options
        return start(model, **options)

    return initialize


def inputs(count: int = 3, rows: int = ROWS) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        yield torch.randn(rows, SEQUENCE, WIDTH, generator=generator).requires_grad_()


def as_dtype(engine: Engine, stream: Tensor) -> Tensor:
    return stream.to(torch.bfloat16) if engine.settings.precision == "bf16" else stream


def update(engine: Engine, *chunks: Tensor) -> None:
    """One update, with a backward for each of ``chunks``."""
    front = engine.as_optimizer()
    for chunk in chunks:
        engine(as_dtype(engine, chunk)).backward()
    front.step()


class Joint(nn.Module):
    """Attends to all rows: the rows of its input are not those of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, stream: Tensor) -> Tensor:
        mixed: Tensor = stream + self.up(stream).softmax(dim=0)
        return mixed


class Balancing(nn.Module):
    """Returns an auxiliary loss, or keeps it."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.keeps = keeps
        self.balance: Tensor | None = None

    def forward(self, stream: Tensor) -> Any:
        stream = self.up(stream)
        if self.keeps:
            self.balance = stream.square().mean()
            return stream
        return stream, stream.square().mean()
