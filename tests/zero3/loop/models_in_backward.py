"""Models whose gradients become final at different times of a backward."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.zero3.plain import (
    WIDTH,
    Tower,
)


class Tied(nn.Module):
    """A table that is the head, too: its gradient is complete only when backward ends."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(300, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 300, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor, skip: int | None = None) -> Tensor:
        tokens = (x.abs() * 100).long() % 300
        hidden = self.table(tokens)
        for index, block in enumerate(self.blocks):
            if index != skip:
                hidden = hidden + functional.gelu(block(hidden))
        result: Tensor = functional.cross_entropy(self.head(hidden).float().flatten(0, 1), tokens.flatten())
        return result


class Twice(Tower):
    """The second block is called before and after the others: its gradient comes in two parts."""

    def forward(self, x: Tensor, skip: int | None = None) -> Tensor:
        x = self.into(x.to(self.into.weight.dtype))
        for index in (1, 0, 1, 2):
            if index != skip:
                x = x + self.blocks[index](x)
        result: Tensor = self.out(x).float().pow(2).mean()
        return result


class Peeking(Tower):
    """Each block is followed by a product with a weight of the next one, whose gradient comes in two parts, too."""

    def forward(self, x: Tensor, skip: int | None = None) -> Tensor:
        x = self.into(x.to(self.into.weight.dtype))
        for index, block in enumerate(self.blocks):
            if index != skip:
                x = x + block(x)
            x = x + functional.linear(x, self.blocks[(index + 1) % 3][1].weight)[:, :WIDTH] / 8
        result: Tensor = self.out(x).float().pow(2).mean()
        return result


class Checkpointed(Tower):
    """``order``: of the blocks. A reentrant checkpoint brings gradients once for each call."""

    def __init__(self, reentrant: bool, order: tuple[int, ...] = (0, 1, 2)) -> None:
        super().__init__()
        self.reentrant, self.order = reentrant, order

    def forward(self, x: Tensor, skip: int | None = None) -> Tensor:
        x = self.into(x.to(self.into.weight.dtype))
        for index in self.order:
            if index != skip:
                x = x + checkpoint(self.blocks[index], x, use_reentrant=self.reentrant)
        result: Tensor = self.out(x).float().pow(2).mean()
        return result


class Penalised(Checkpointed):
    """Blocks of one parameter each. The penalty's part of its gradient is there before the block is recomputed."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(reentrant)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in self.order)

    def forward(self, x: Tensor, skip: int | None = None) -> Tensor:
        weight = self.get_submodule("blocks.1").weight
        assert isinstance(weight, Tensor)
        return super().forward(x, skip) + 0.01 * weight.float().square().mean()


class ReadByACheckpoint(Penalised):
    """The checkpoint of the first block reads the weight of the last one, whose other part comes before."""

    def forward(self, x: Tensor, skip: int | None = None) -> Tensor:
        def first(x: Tensor) -> Tensor:
            weight = self.get_submodule("blocks.2").weight
            assert isinstance(weight, Tensor)
            hidden: Tensor = self.blocks[0](x) + functional.linear(x, weight)
            return hidden

        x = self.into(x.to(self.into.weight.dtype))
        x = x + checkpoint(first, x, use_reentrant=self.reentrant)
        for index in (1, 2):
            if index != skip:
                x = x + self.blocks[index](x)
        result: Tensor = self.out(x).float().pow(2).mean()
        return result


class FarPeeking(Tower):
    """The first block reads a weight of the last one, whose gradients are complete long before, asking for none."""

    def __init__(self, *, checkpointed: bool, frozen: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.get_submodule("blocks.2.1").requires_grad_(not frozen)

    def forward(self, x: Tensor, skip: int | None = None) -> Tensor:
        def first(x: Tensor) -> Tensor:
            weight = self.blocks[2][1].weight.detach()
            hidden: Tensor = self.blocks[0](x) + functional.linear(x, weight)[:, :WIDTH]
            return hidden

        x = self.into(x.to(self.into.weight.dtype))
        x = x + (checkpoint(first, x, use_reentrant=False) if self.checkpointed else first(x))
        for index in (1, 2):
            if index != skip:
                x = x + self.blocks[index](x)
        result: Tensor = self.out(x).float().pow(2).mean()
        return result


def frozen_in_part() -> nn.Module:
    model = Tower()
    model.blocks[1].requires_grad_(False)  # a group with nothing to train, in the middle
    model.into.bias.requires_grad_(False)
    model.get_submodule("blocks.0.1").weight.requires_grad_(False)
    return model
