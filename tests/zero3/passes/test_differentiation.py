"""``torch.autograd.grad`` and ``backward(inputs=...)``: the gradients of a plain loop, wherever parameters live."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
    assert_same_everywhere,
    differing,
    inputs,
    run_engine,
    update,
)

Start = Callable[..., Any]
CHECKPOINTS = ["none", "in each block", "around each block", "around all blocks", "nested"]


class Layer(nn.Module):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.inside = inside

    def compute(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(x)))
        return result

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.compute, x, use_reentrant=False) if self.inside else self.compute(x)


class Checkpointed(nn.Module):
    """An embedding that is read again as the head, a frozen parameter, one that is not used, and checkpoints."""

    def __init__(self, checkpoints: str) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.embedding = nn.Embedding(200, WIDTH)
        self.blocks = nn.ModuleList(Layer(checkpoints in ("in each block", "nested")) for _ in range(3))
        self.blocks[1].up.bias.requires_grad_(False)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            around = self.checkpoints == "around each block"
            x = checkpoint(block, x, use_reentrant=False) if around else block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[:, :3].float() * 1000).long() % 200
        stream = self.embedding(tokens)
        around = self.checkpoints in ("around all blocks", "nested")
        stream = checkpoint(self.body, stream, use_reentrant=False) if around else self.body(stream)
        logits = functional.linear(stream, self.embedding.weight)
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens.roll(1, 0).flatten())


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [param for param in module.parameters() if param.requires_grad]


def norms(gradients: Any) -> list[float]:
    return [-1.0 if gradient is None else float(gradient.double().norm()) for gradient in gradients]


@pytest.mark.one_of(3)
@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
def test_autograd_grad_under_checkpointing(start: Start, checkpoints: str) -> None:
    def script(loop: Loop, ask: bool = True) -> list[float]:
        figures = []
        for x in inputs(3):
            if ask:
                figures += norms(torch.autograd.grad(loop(x), trained(loop.module), allow_unused=True))
            loss = loop(x)
            if ask:
                some = list(loop.module.get_submodule("blocks.0").parameters())
                figures += norms(torch.autograd.grad(loss, some, retain_graph=True))
            figures.append(loss.item())
            loop.backward(loss)
            loop.step()
        return figures

    build = partial(Checkpointed, checkpoints)
    run = assert_same_everywhere(start, build, script, roomy=True)
    undisturbed = run_engine(start, build, partial(script, ask=False))
    assert differing(run.masters, undisturbed.masters) == []


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
def test_backward_with_inputs_under_checkpointing(start: Start, checkpoints: str) -> None:
    """Only these get gradients, and are stepped."""

    def script(loop: Loop) -> list[float]:
        losses = []
        for number, x in enumerate(inputs(4)):
            loss = loop(x)
            losses.append(loss.item())
            chosen = trained(loop.module.get_submodule("blocks"))
            loss.backward(inputs=chosen if number % 2 else chosen[:3])
            loop.step()
        return losses

    build = partial(Checkpointed, checkpoints)
    run = assert_same_everywhere(start, build, script, roomy=True)
    torch.manual_seed(11)
    original = dict(build().named_parameters())
    moved = {name for name, master in run.masters.items() if not torch.equal(master, original[name])}
    assert moved == {name for name in run.masters if name.startswith("blocks.")}


@pytest.mark.parametrize("checkpoints", ["none", "around all blocks"])
def test_what_autograd_grad_takes(start: Start, checkpoints: str) -> None:
    """Parameters more than once and in a dict, batches of gradients, zeros for what is not used, hooks."""

    def script(loop: Loop) -> list[float]:
        figures: list[float] = []
        named = {name: param for name, param in loop.module.named_parameters() if param.requires_grad}
        weight, unused = named["blocks.2.up.weight"], named["unused.weight"]
        frozen = loop.module.get_parameter("blocks.1.up.bias")
        hook = weight.register_hook(lambda gradient: 2 * gradient)
        for x in inputs(2):
            twice = torch.autograd.grad(loop(x), (weight, named["embedding.weight"], weight))
            figures += norms(twice)
            assert torch.equal(twice[0], twice[2])
            by_name: Any = torch.autograd.grad(loop(x), named, materialize_grads=True)  # type: ignore[call-overload]
            assert list(by_name) == list(named)
            assert torch.equal(by_name["unused.weight"], torch.zeros(WIDTH, WIDTH))
            figures += norms(by_name.values())
            with pytest.raises(RuntimeError, match="not have been used in the graph"):
                torch.autograd.grad(loop(x), [weight, unused])
            with pytest.raises(RuntimeError, match="does not require grad"):
                torch.autograd.grad(loop(x), [weight, frozen])
            if loop.module.checkpoints == "none":  # torch recomputes nothing under vmap
                of_rows = torch.tensor([1.0, 0.0, -2.0])
                (batch,) = torch.autograd.grad(loop(x), [weight], of_rows, is_grads_batched=True)
                figures += norms(batch)
                assert batch[1].abs().max() == 0 and torch.equal(batch[2], -2 * batch[0])
            figures.append(update(loop, x))
        hook.remove()
        return figures

    assert_same_everywhere(start, partial(Checkpointed, checkpoints), script, trains=False, roomy=True)


def test_the_gradient_of_a_parameter_by_itself(start: Start) -> None:
    engine = start(Checkpointed("none"), precision="fp32", accumulation=1, threshold=0, **STREAMED)
    weight = engine.module.blocks[0].up.weight
    incoming = torch.full_like(weight, 3.0)
    (gradient,) = torch.autograd.grad(weight, weight, incoming)
    assert torch.equal(gradient, incoming)
