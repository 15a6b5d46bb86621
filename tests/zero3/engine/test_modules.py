"""How modules are written: each way gives the plain loop's results, to the bit wherever state is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.crossed import crossed
from tests.zero3.plain import WIDTH, Loop, assert_same_everywhere, inputs, update

Start = Callable[..., Any]


def plainly(loop: Loop) -> list[float]:
    return [update(loop, x.to(torch.bfloat16)) for x in inputs(4)]


def mean_square(x: Tensor) -> Tensor:
    result: Tensor = x.float().pow(2).mean()
    return result


def block(hidden: int = 2 * WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH))


class TiedModules(nn.Module):
    """A head that shares the embedding's weight, and two blocks that share one layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.blocks[2][0].weight = self.blocks[0][0].weight
        self.head = nn.Linear(WIDTH, 300, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[:, :3].float() * 1000).long() % 300
        stream = self.embedding(tokens)
        for layer in self.blocks:
            stream = stream + layer(stream)
        return functional.cross_entropy(self.head(stream).float().flatten(0, 1), tokens.roll(1, 0).flatten())


class UsedTwice(nn.Module):
    """A block that runs twice in a row, and again after another; a layer that two blocks call."""

    class Inner(nn.Module):
        def __init__(self, shared: nn.Module) -> None:
            super().__init__()
            self.own, self.shared = nn.Linear(WIDTH, WIDTH), shared

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = torch.tanh(self.own(self.shared(x)))
            return result

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.Inner(shared) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        return mean_square(first(second(first(first(x)))) + third(x))


class Lists(nn.Module):
    """Parameters in a ParameterList and a ParameterDict, read by the module that holds the container."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 6) for _ in range(2))
            self.named = nn.ParameterDict({"scale": torch.ones(WIDTH), "shift": torch.zeros(WIDTH)})

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.weights:
                x = torch.tanh(x @ weight)
            return x * self.named["scale"] + self.named["shift"]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))
        self.gains = nn.ParameterList(torch.ones(WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for gain, layer in zip(self.gains, self.layers, strict=True):
            x = layer(x) * gain
        return mean_square(x)


class Pair(NamedTuple):
    left: Tensor
    right: Tensor | None


@dataclass
class Bag:
    """Unknown to pytree."""

    pairs: list[tuple[Tensor, Pair]]
    note: str | None = None


class Nested(nn.Module):
    """Blocks that take and return dicts, dataclasses, named tuples, None and lists of tuples."""

    class ToDict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, *, nothing: None = None) -> dict[str, Any]:
            return {"out": [torch.tanh(self.layer(x))], "none": nothing, "deep": {"number": 1}}

    class ToBag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, outputs: dict[str, Any]) -> Bag:
            x = outputs["out"][0]
            return Bag([(x, Pair(torch.tanh(self.layer(x)), None))])

    class FromBag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, *, bag: Bag) -> tuple[Pair, None]:
            ((x, pair),) = bag.pairs
            return Pair(self.layer(x + pair.left), pair.right), None

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.ToDict(), self.ToBag(), self.FromBag()])

    def forward(self, x: Tensor) -> Tensor:
        to_dict, to_bag, from_bag = self.blocks
        pair, _ = from_bag(bag=to_bag(to_dict(x, nothing=None)))
        return mean_square(pair.left)


class Buffers(nn.Module):
    """Running statistics, and a buffer that forward writes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(3)
        )
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("unsaved", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        for layer in self.blocks:
            x = torch.tanh(layer(x))
        with torch.no_grad():
            self.average.lerp_(x.mean(0).float(), 0.5)
        return mean_square(x * self.unsaved + self.average)


class Dropout(nn.Module):
    """Random numbers are drawn in the model's order, so wherever state lives, the same are drawn."""

    def __init__(self, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH)) for _ in range(3)
        )
        self.reentrant = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            if self.reentrant is None:
                x = x + layer(x)
            else:
                x = x + checkpoint(layer, x, use_reentrant=self.reentrant, preserve_rng_state=True)
        return mean_square(functional.dropout(x, 0.1, self.training))


class SavesItsParameter(nn.Module):
    """A custom autograd function that saves a parameter, one that saves a view of it."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight, weight[0])
            return x @ weight + weight[0]

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, weight, row = ctx.saved_tensors
            of_weight = x.T @ grad
            of_weight[0] += grad.sum(0) + 0 * row
            return grad @ weight.T, of_weight

    class Block(nn.Module):
        def __init__(self, scale: Any) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)
            self.scale = scale

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.scale.apply(torch.tanh(x), self.weight)
            return result

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block(self.Scale) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            x = layer(x)
        return mean_square(x)


class KeywordsOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, *, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        for layer in self.blocks:
            x = x + layer(input=x)
        return {
            "loss": None if labels is None else functional.mse_loss(x.float(), labels),
            "logits": (x, [None]),
        }


class ViewsAndSlices(nn.Module):
    """A parameter used through views: rows of it, its transpose, a split, in-place work on a copy."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fused = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / 6)
            self.bias = nn.Parameter(torch.zeros(2, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            query, key, value = self.fused.split(WIDTH)
            scores = torch.softmax((x @ query.T + self.bias[0]) @ (x @ key.mT).T, dim=-1)
            out = (scores @ (x @ value.t())).add_(self.bias[1:].squeeze(0))
            return x + out

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            x = layer(x)
        return mean_square(x)


WAYS: dict[str, Callable[[], nn.Module]] = {
    "tied modules": TiedModules,
    "used twice": UsedTwice,
    "parameter containers": Lists,
    "nested inputs and outputs": Nested,
    "buffers": Buffers,
    "dropout": Dropout,
    "dropout, checkpointed": lambda: Dropout(checkpointed=False),
    "dropout, checkpointed reentrantly": lambda: Dropout(checkpointed=True),
    "custom functions": SavesItsParameter,
    "views and slices": ViewsAndSlices,
}


@pytest.mark.one_of(2)
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_write_a_module(start: Start, way: str) -> None:
    def script(loop: Loop) -> list[float]:
        losses = []
        for x in inputs(4):
            x_in_16_bits = x.to(torch.bfloat16)
            # Reentrant checkpointing recomputes only what an input's gradient runs through.
            losses.append(update(loop, x_in_16_bits.requires_grad_("reentrantly" in way)))
        return losses

    assert_same_everywhere(start, WAYS[way], script, precision="bf16")


def test_a_forward_with_keywords_only(start: Start) -> None:
    def script(loop: Loop) -> list[float]:
        losses = []
        for x in inputs(4):
            out = loop(x=x, labels=x.roll(1, 0))
            losses.append(out["loss"].item())
            loop.backward(out["loss"] + out["logits"][0].float().abs().mean())
            loop.step()
            assert loop(x=x)["loss"] is None
        return losses

    assert_same_everywhere(start, KeywordsOnly, script)


class Checkpointed(nn.Module):
    """Blocks under activation checkpointing in several ways; ``way`` "" is none."""

    def __init__(self, way: str, reentrant: bool) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*(block() for _ in range(4)))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.way, self.reentrant = way, reentrant

    def forward(self, x: Tensor) -> Tensor:
        again = partial(checkpoint, use_reentrant=self.reentrant)
        x = self.into(x)
        if self.way == "each":
            for layer in self.blocks:
                x = x + again(layer, x)
        elif self.way == "nested":
            x = again(self.halves, again, x)
        elif self.way == "whole and inner":
            x = again(lambda x: self.halves(lambda f, *args: f(*args), x), x)
        elif self.way == "sequential":
            x = checkpoint_sequential(self.blocks, 2, x, use_reentrant=self.reentrant)
        elif self.way == "the root's layers too":
            x = again(lambda x: self.out(self.blocks(self.into(x))), x)
        else:
            x = self.blocks(x)
        return mean_square(self.out(x))

    def halves(self, again: Callable[..., Tensor], x: Tensor) -> Tensor:
        first, two, three, four = self.blocks
        x = again(lambda x: two(x + first(x)), x)
        return again(lambda x: four(x + three(x)) + first(x), x)


# Nested in a reentrant one, a checkpoint first runs without gradients; it is recomputed with them.
@pytest.mark.one_of(2)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    ("way", "reentrant"),
    crossed(["each", "nested", "whole and inner", "sequential", "the root's layers too"], [False, True]),
)
def test_activation_checkpointing(start: Start, way: str, reentrant: bool) -> None:
    def script(loop: Loop) -> list[float]:
        return [update(loop, x.to(torch.bfloat16).requires_grad_()) for x in inputs(4)]

    assert_same_everywhere(start, lambda: Checkpointed(way, reentrant), script, precision="bf16")


class Scaled(nn.Module):
    """Backward asks for the parameter of a product before the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * self.scale[:1]


def test_several_blocks_under_one_checkpoint_need_the_room_of_one(start: Start) -> None:
    """A node holds its parameter while the blocks before it are recomputed, and gets it back afterwards."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Scaled() for _ in range(4))

        def through(self, x: Tensor) -> Tensor:
            for layer in self.blocks:
                x = layer(x)
            return x

        def forward(self, x: Tensor) -> Tensor:
            return mean_square(checkpoint(self.through, x, use_reentrant=False))

    assert_same_everywhere(start, Model, plainly, precision="bf16")


def test_checkpointing_that_sometimes_stops_early(start: Start) -> None:
    """Only a part of a block's recomputation is needed: torch ends it by an exception inside the block's forward."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            return x + self.second(x.detach()).detach()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Wide() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.blocks:
                x = checkpoint(layer, x, use_reentrant=False)
            return mean_square(x)

    def script(loop: Loop) -> list[float]:
        return [update(loop, x.to(torch.bfloat16)) for x in inputs(3)]

    assert_same_everywhere(start, Model, script, precision="bf16", accumulation=1)


HOOKS = [
    "full backward",
    "full backward pre",
    "forward",
    "forward that replaces",
    "on a tensor",
    "on a parameter",
]


@pytest.mark.one_of(2)
@pytest.mark.parametrize("kind", HOOKS)
def test_the_users_own_hooks(start: Start, kind: str) -> None:
    """They run once per pass, and see, and may change, what they would without us."""
    counts: list[int] = []

    def script(loop: Loop) -> list[float]:
        layer: Any = loop.module.get_submodule("blocks.1")
        norms: list[float] = []

        def note(*tensors: Any) -> None:
            norms.extend(float(t.detach().double().norm()) for t in tensors if isinstance(t, Tensor))

        if kind == "full backward":
            layer.register_full_backward_hook(lambda module, grad_in, grad_out: note(*grad_in, *grad_out))
        elif kind == "full backward pre":
            layer.register_full_backward_pre_hook(lambda module, grad_out: (2 * grad_out[0],))
        elif kind == "forward":
            # The module's own parameters are there when a hook runs before it.
            layer.register_forward_pre_hook(lambda module, args: note(*args, *module.parameters()))
            layer.register_forward_hook(lambda module, args, out: note(out))
        elif kind == "forward that replaces":
            layer.register_forward_hook(lambda module, args, out: out * 0.5 + args[0])
        elif kind == "on a tensor":

            def watch(module: nn.Module, args: Any, out: Tensor) -> None:
                out.register_hook(lambda grad: (note(grad), 3 * grad)[1])

            layer.register_forward_hook(watch)
        else:
            layer[0].weight.register_hook(lambda grad: (note(grad), -grad)[1])
        losses = [update(loop, x.to(torch.bfloat16)) for x in inputs(3)]
        counts.append(len(norms))
        return losses + norms

    assert_same_everywhere(start, lambda: Checkpointed("", False), script, precision="bf16")
    assert len({*counts}) == 1
