"""Parameters read by modules that do not hold them: their group unshards by itself, and no bit depends on placement."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.zero3.plain import (
    STREAMED,
    WIDTH,
    Loop,
    Tower,
    assert_nothing_held,
    assert_same_everywhere,
    differing,
    inputs,
    run_engine,
    update,
)
from tiering.errors import ResidencyError

Start = Callable[..., Any]


def mean_square(x: Tensor) -> Tensor:
    result: Tensor = x.float().pow(2).mean()
    return result


class TiedInForward(nn.Module):
    """The embedding is a group of its own; the root's forward reads its weight again for the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[:, :3].float() * 1000).long() % 300
        stream = self.embedding(tokens)
        for layer in self.blocks:
            stream = stream + torch.tanh(layer(stream))
        logits = functional.linear(stream, self.embedding.weight)
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens.roll(1, 0).flatten())


class PlainPythonList(nn.Module):
    """Parameters registered in one module, and held in a list that torch does not know by the one that reads them."""

    class Reader(nn.Module):
        def __init__(self, tables: list[nn.Parameter]) -> None:
            super().__init__()
            self.own, self.tables = nn.Linear(WIDTH, WIDTH), tables

        def forward(self, x: Tensor) -> Tensor:
            for table in self.tables:
                x = x + torch.tanh(x @ table)
            result: Tensor = self.own(x)
            return result

    def __init__(self) -> None:
        super().__init__()
        tables = [nn.Parameter(torch.randn(WIDTH, WIDTH) / 6) for _ in range(4)]
        self.store = nn.ParameterList(tables)
        self.blocks = nn.ModuleList(self.Reader(tables[i : i + 2]) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for reader in self.blocks:
            x = reader(x)
        return mean_square(x)


class ReadBySibling(nn.Module):
    """A block's forward computes with the weight of the block after it, without calling that block."""

    class Peeking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.next: list[nn.Module] = []

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.layer(x))
            for other in self.next:
                x = x + functional.linear(x, other.layer.weight, other.layer.bias)
            return x

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Peeking() for _ in range(3))
        for first, other in zip(self.blocks, self.blocks[1:], strict=False):
            first.next.append(other)

    def forward(self, x: Tensor) -> Tensor:
        for peeking in self.blocks:
            x = peeking(x)
        return mean_square(x)


class ChildNeverCalled(nn.Module):
    """A block reads the weights of a child that is a group of its own, and never calls it (as Mamba does)."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
            self.gate = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.inner:
                x = x + self.gate * torch.tanh(x @ layer.weight.t() + layer.bias)
            return x

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self.Block(), self.Block()
        self.never = nn.Linear(WIDTH, 5 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x)) + self.never.bias[:WIDTH]
        return mean_square(torch.einsum("bi,oi->bo", x, self.never.weight))


class Penalised(nn.Module):
    """The root's forward reads every parameter of every block, for a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            x = torch.tanh(layer(x))
        penalty = torch.stack([p.float().pow(2).sum() for p in self.parameters()]).sum()
        return mean_square(x) + 1e-3 * penalty


class ReadsWhatRanLater(nn.Module):
    """A function under checkpointing reads a block that backward holds when the function is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first, two, three = self.blocks

        def part(x: Tensor) -> Tensor:
            return torch.tanh(two(functional.linear(x, first.weight)))

        x = checkpoint(part, three(x), use_reentrant=False)
        return mean_square(first(x))


class Recomputed(nn.Module):
    """A function under checkpointing that reads two blocks' weights and calls one of them."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        first, two, three, four = self.blocks

        def part(x: Tensor, this: Any, other: Any) -> Tensor:
            result: Tensor = torch.tanh(this(x)) + functional.linear(x, other.weight, this.bias)
            return result

        x = checkpoint(part, x, first, three, use_reentrant=self.reentrant)
        x = checkpoint(part, x, two, first, use_reentrant=self.reentrant)
        return mean_square(part(x, four, two))


class RecomputedWhileLive(nn.Module):
    """A function under checkpointing reads a block's weight; recomputed while backward is inside of that block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first, two, three = self.blocks

        def part(x: Tensor) -> Tensor:
            return torch.tanh(two(functional.linear(x, first.weight)))

        x = checkpoint(part, three(x), use_reentrant=False)
        return mean_square(first(x))


class Elsewhere(nn.Module):
    """Free functions, views taken earlier in the same forward, and modules that are called through another's method."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)

        def project(self, x: Tensor) -> Tensor:
            return x @ self.weight

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.project(x))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first, two, three, four = self.blocks
        rows = four.weight[:2]
        x = three.project(two(first.project(x)))
        x = x + rows.sum(0)
        norm = two.weight.norm().clamp(min=1)
        return mean_square(four(x) / norm)


class ReadByItsEncoder(nn.Module):
    """torch's encoder, which looks at its first layer before it runs: a subclass or a hook of it reads that layer."""

    class Encoder(nn.TransformerEncoder):
        def forward(self, x: Tensor, **options: Any) -> Tensor:  # type: ignore[override] # fewer arguments
            penalty = self.layers[0].linear1.weight.float().square().mean()
            return super().forward(x, **options) + penalty.to(x.dtype)

    def __init__(self, *, by_hook: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        kind = nn.TransformerEncoder if by_hook else self.Encoder
        self.encoder = kind(layer, 3, enable_nested_tensor=False)
        if by_hook:
            self.encoder.register_forward_pre_hook(
                lambda encoder, args: (args[0] * encoder.layers[0].linear1.weight.norm(),)
            )

    def forward(self, x: Tensor) -> Tensor:
        return mean_square(self.encoder(x[:, None]))


WAYS: dict[str, Callable[[], nn.Module]] = {
    "tied in forward": TiedInForward,
    "a plain Python list": PlainPythonList,
    "read by a sibling": ReadBySibling,
    "a child that is never called": ChildNeverCalled,
    "a penalty over all parameters": Penalised,
    "recomputed": lambda: Recomputed(reentrant=False),
    "recomputed reentrantly": lambda: Recomputed(reentrant=True),
    "recomputed while live": RecomputedWhileLive,
    "methods, views and norms": Elsewhere,
    "a layer by its encoder": lambda: ReadByItsEncoder(by_hook=False),
    "a layer by a hook of its encoder": lambda: ReadByItsEncoder(by_hook=True),
}


@pytest.mark.one_of(3)
@pytest.mark.parametrize("way", WAYS)
def test_reading_what_another_module_holds(start: Start, way: str) -> None:
    def script(loop: Loop) -> list[float]:
        losses = []
        for x in inputs(4):
            x_in_16_bits = x.to(torch.bfloat16).requires_grad_()  # so that all weights are saved
            losses.append(update(loop, x_in_16_bits))
            with torch.no_grad(), warnings.catch_warnings():
                # Reentrant checkpoints give this warning.
                warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
                losses.append(loop(x_in_16_bits).item())
        return losses

    assert_same_everywhere(start, WAYS[way], script, precision="bf16", roomy=True)


def test_hooks_of_the_user_read_parameters(start: Start) -> None:
    """A module's own, after it ran, and those of a module that runs later."""

    def script(loop: Loop) -> list[float]:
        norms: list[float] = []

        def note(module: nn.Module, args: Any, out: Tensor) -> None:
            later: Any = loop.module.get_submodule("blocks.2")
            for p in (*module.parameters(), later.weight):
                norms.append(float(p.detach().double().norm()))

        loop.module.get_submodule("blocks.1").register_forward_hook(note)
        losses = [update(loop, x.to(torch.bfloat16)) for x in inputs(3)]
        return losses + norms

    assert_same_everywhere(start, Penalised, script, precision="bf16", roomy=True)


def test_hooks_around_ours_read_the_weight_of_their_block(start: Start) -> None:
    """Before the block is unsharded, and after it was resharded; with the smallest budgets, too."""

    def script(loop: Loop) -> list[float]:
        norms: list[float] = []

        def read(module: nn.Module, *_: Any) -> None:
            norms.append(float(module.get_parameter("3.weight").detach().double().norm()))

        for number in range(3):
            block = loop.module.get_submodule(f"blocks.{number}")
            block.register_forward_pre_hook(read, prepend=True)
            block.register_forward_hook(read)
        losses = [update(loop, x.requires_grad_()) for x in inputs(3)]
        assert len(norms) == 18
        return losses + norms

    assert_same_everywhere(start, Tower, script, trains=False)


def test_a_borrowed_view_that_had_to_make_room_is_never_read_as_something_else(start: Start) -> None:
    class Keeps(Tower):
        def forward(self, x: Tensor, skip: int | None = None) -> Tensor:
            weight = self.get_parameter("blocks.0.3.weight").t()
            return super().forward(x, skip) * weight.square().mean()

    engine = start(Keeps(), precision="fp32", threshold=0, accumulation=1, prefetch=0, **STREAMED)
    (x,) = inputs(1)
    with pytest.raises(RuntimeError) as caught:
        engine(x)
    words = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "[TIER-RESIDENT]" in words
    roomy = start(Keeps(), precision="fp32", threshold=0, accumulation=1, **STREAMED)
    assert update(roomy, x) > 0
    assert_nothing_held(engine)


READERS: dict[str, Callable[[nn.Module, Callable[..., None]], Any]] = {
    "before a block": lambda block, read: block.register_full_backward_pre_hook(read),
    "after a block": lambda block, read: block.register_full_backward_hook(read),
    "at its output": lambda block, read: block.register_forward_hook(
        lambda module, _, output: output.register_hook(lambda gradient: read(module)) and None
    ),
    "at its weight": lambda block, read: block.get_parameter("3.weight").register_hook(
        lambda gradient: read(block)
    ),
}


@pytest.mark.parametrize("where", READERS)
def test_hooks_of_backward_read_the_weight_of_their_block(start: Start, where: str) -> None:
    """With the smallest budgets, too: the block that backward has left makes room."""

    def script(loop: Loop) -> list[float]:
        norms: list[float] = []

        def read(module: nn.Module, *_: Any) -> None:
            norms.append(float(module.get_parameter("3.weight").detach().double().norm()))

        for number in range(3):
            READERS[where](loop.module.get_submodule(f"blocks.{number}"), read)
        losses = [update(loop, x.requires_grad_()) for x in inputs(3)]
        assert len(norms) == 9
        return losses + norms

    assert_same_everywhere(start, Tower, script, trains=False)


def test_what_was_borrowed_makes_room(start: Start) -> None:
    """A plan counts on one block at a time: parameters that are read one after the other take turns."""

    def script(loop: Loop) -> list[float]:
        return [update(loop, x) for x in inputs(3)]

    assert_same_everywhere(start, Penalised, script)


class Stacked(Penalised):
    """The root's forward reads the weights of all blocks in one operation."""

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.stack([block.get_parameter("weight") for block in self.blocks])
        return super().forward(x) + weights.float().square().mean()


def test_too_little_room_for_one_operation_says_so(start: Start) -> None:
    engine = start(Stacked(), threshold=0, accumulation=1, prefetch=0, **STREAMED)
    with pytest.raises(ResidencyError, match=r"stack reads 'blocks\..*no room.*Raise device_budget"):
        engine(torch.ones(4, WIDTH, dtype=torch.bfloat16))
    roomy = start(Stacked(), threshold=0, accumulation=1, prefetch=4 * 1152, **STREAMED)
    update(roomy, torch.ones(4, WIDTH, dtype=torch.bfloat16))
    assert_nothing_held(engine)


class ReadAfterItRan(nn.Module):
    """Recomputed while backward holds a block: a module calls it, takes a view of its weight, calls another block."""

    class Reader(nn.Module):
        def __init__(self, first: nn.Linear, other: nn.Linear) -> None:
            super().__init__()
            self.blocks = [first, other]  # in a plain list: they belong to the model

        def forward(self, x: Tensor) -> Tensor:
            first, other = self.blocks
            x = torch.tanh(first(x))
            turned = first.weight.t()
            x = torch.tanh(other(x))  # its bytes could take the room of those that backward alone holds
            there = turned.untyped_storage().nbytes() > 0 and bool(turned.isfinite().all())
            assert there, "the weight is gone while the module that reads it runs"
            return torch.tanh(x @ turned)

    def __init__(self) -> None:
        super().__init__()
        first, other, wide = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.blocks = nn.ModuleList([first, other, wide])
        self.reader = self.Reader(first, other)

    def forward(self, x: Tensor) -> Tensor:
        first, _, wide = self.blocks
        x = checkpoint(self.reader, wide(x)[:, :WIDTH], use_reentrant=False)
        return mean_square(first(x))


def test_a_view_of_a_block_that_ran_before_and_that_backward_holds(start: Start) -> None:
    """Nothing is fetched ahead, so that what is given up is gone; the widest block has room for the other two."""

    def script(loop: Loop) -> list[float]:
        return [update(loop, x.requires_grad_()) for x in inputs(4)]

    reference = run_engine(start, ReadAfterItRan, script)
    run = run_engine(start, ReadAfterItRan, script, prefetch=0, **STREAMED)
    assert run.losses == reference.losses and len({*run.losses}) == 4
    assert differing(run.masters, reference.masters) == []


def test_a_recomputed_function_that_reads_a_block_which_backward_holds(start: Start) -> None:
    def script(loop: Loop) -> list[float]:
        return [update(loop, x.bfloat16().requires_grad_()) for x in inputs(4)]

    assert_same_everywhere(start, ReadsWhatRanLater, script, precision="bf16", roomy=True)
