"""The gradient of a tied parameter is accumulated part by part, unless somebody wants the whole of it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tiering
from tests.zero3.conftest import config
from tiering.errors import PlacementError
from zero3.params import resharded
from zero3.passes import gradients

WIDTH, VOCABULARY = 32, 600
STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "host": {"offload_param": "cpu", "offload_optimizer": "cpu"},
    "nvme": STREAMED,
    "nvme, no prefetch": {**STREAMED, "prefetch": 0},
    "nvme, the tied parameter persistent": {**STREAMED, "threshold": VOCABULARY * WIDTH + 1},
}


class Tied(nn.Module):
    """An embedding that is larger than the blocks, tied to the output head."""

    def __init__(self, recompute: str = "") -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def body(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return torch.as_tensor(self.head(hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        logits = checkpoint(self.body, tokens, use_reentrant=False) if self.recompute else self.body(tokens)
        return nn.functional.cross_entropy(logits.float().flatten(0, -2), tokens.roll(1).flatten())


class Strided(torch.autograd.Function):
    """The identity, whose gradient lies in memory column by column."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].t().contiguous().t()


class StridedHead(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, Strided.apply(self.weight))


def tokens_of(step: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(step))


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the parts that are taken."""
    shapes: list[tuple[int, ...]] = []
    put = resharded.put_gradient

    def counted(param: nn.Parameter, gradient: Tensor | None) -> None:
        if gradient is not None:
            shapes.append(tuple(gradient.shape))
        put(param, gradient)

    monkeypatch.setattr(resharded, "put_gradient", counted)
    return shapes


def train(engine: Any, steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    losses = []
    for step in range(steps * engine.settings.gradient_accumulation_steps):
        loss = engine(tokens_of(step))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    assert len({*losses}) == len(losses), "it does not train"
    return losses, engine.master_state_dict()


@pytest.mark.parametrize("recompute", ["", "all"], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parts_give_the_same_bits_in_every_placement(
    start: Callable[..., Any],
    differing: Callable[..., list[str]],
    parts: list[tuple[int, ...]],
    precision: str,
    recompute: str,
) -> None:
    def run(**placement: Any) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(5)
        options = {"precision": precision, "accumulation": 2, "threshold": 0}
        return train(start(Tied(recompute), **(options | placement)))

    losses, masters = run()
    assert parts == [(VOCABULARY, WIDTH)] * 12, "two of each micro-batch"
    for name, placement in PLACEMENTS.items():
        parts.clear()
        same_losses, same = run(**placement)
        assert len(parts) == 12, name
        assert same_losses == losses, name
        assert differing(same, masters) == [], name


class TiedInside(nn.Module):
    """Tied by two modules of one block, and by a block to a small table of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))
            for _ in range(3)
        )
        self.blocks[0][2].weight = self.blocks[0][0].weight
        self.blocks[1][0].weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(nn.functional.one_hot(tokens % WIDTH, WIDTH).to(self.table.weight.dtype))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden.float().pow(2).mean()


@pytest.mark.parametrize("threshold", [0, WIDTH * WIDTH + 1])
@pytest.mark.parametrize("in_backward", [False, True], ids=["step", "step in backward"])
def test_groups_and_what_is_tied_inside_of_them_change_no_bit(
    start: Callable[..., Any], differing: Callable[..., list[str]], threshold: int, in_backward: bool
) -> None:
    def run(**placement: Any) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(5)
        return train(start(TiedInside(), precision="fp32", accumulation=2, clip=0.0, **placement))

    losses, masters = run(threshold=0)
    same_losses, same = run(threshold=threshold, step_in_backward=in_backward, **STREAMED)
    assert same_losses == losses
    assert differing(same, masters) == []


def test_the_parts_are_the_gradient(
    start: Callable[..., Any], parts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The head's part is copied in many pieces, the last one shorter.
    monkeypatch.setattr(gradients, "COPIED_AT_ONCE", 7 * WIDTH)
    torch.manual_seed(5)
    model = Tied()
    model.head.__class__ = StridedHead
    torch.manual_seed(5)
    plain = Tied()
    engine = start(model, precision="fp32", accumulation=1, threshold=0, clip=0, **STREAMED)
    engine.backward(engine(tokens_of(0)))
    plain(tokens_of(0)).backward()
    expected = plain.embedding.weight.grad
    assert expected is not None
    torch.testing.assert_close(engine.get_fp32_gradient("embedding.weight"), expected, rtol=1e-5, atol=1e-7)
    assert len(parts) == 2


def test_the_whole_gradient_reaches_hooks_of_others(
    start: Callable[..., Any], parts: list[tuple[int, ...]]
) -> None:
    model = Tied()
    norms: list[float] = []
    model.embedding.weight.register_hook(lambda gradient: norms.append(gradient.double().norm().item()))
    engine = start(model, precision="fp32", accumulation=1, threshold=0, clip=0, **STREAMED)
    engine.backward(engine(tokens_of(0)))
    assert parts == []
    norm = engine.get_fp32_gradient("embedding.weight").double().norm().item()
    assert norms == [pytest.approx(norm, rel=1e-6)]


def test_the_whole_gradient_is_given_where_it_is_asked_for(
    start: Callable[..., Any], parts: list[tuple[int, ...]]
) -> None:
    torch.manual_seed(5)
    engine = start(Tied(), precision="fp32", accumulation=1, threshold=0, clip=0, **STREAMED)
    torch.manual_seed(5)
    plain = Tied()
    weight = engine.module.embedding.weight
    (gradient,) = torch.autograd.grad(engine(tokens_of(0)), [weight])
    (expected,) = torch.autograd.grad(plain(tokens_of(0)), [plain.embedding.weight])
    torch.testing.assert_close(gradient, expected)
    engine(tokens_of(0)).backward(inputs=[engine.module.blocks[0].weight])
    assert engine.get_fp32_gradient("embedding.weight") is None
    assert parts == []


def test_plan_and_refusal_say_what_is_beside_the_budgets(start: Callable[..., Any]) -> None:
    engine = start(Tied(), precision="fp32", threshold=0, **STREAMED)
    assert engine.plan.workload.gradients_beside == 2 * VOCABULARY * WIDTH * 4
    assert "up to 150.00 KiB of gradients" in str(engine.plan)
    with pytest.raises(PlacementError, match=r"budgets: activations, up to 150.00 KiB of gradients"):
        start(Tied(), precision="fp32", threshold=0, host_budget="64KiB", **STREAMED)


def resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def growth(nvme: Path) -> tuple[int, int]:
    """Bytes that backward takes beside the budgets: as planned, and as resident memory grows in a process of its own.

    Each part is larger than what malloc keeps for later use, so that resident memory tells how many there are.
    """
    model = Tied()
    vocabulary, width = 40_000, 256
    model.embedding = nn.Embedding(vocabulary, width)
    model.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
    model.head = nn.Linear(width, vocabulary, bias=False)
    model.head.weight = model.embedding.weight
    budgets = {"device_budget": "256MiB", "host_budget": "512MiB"}
    settings = config(nvme, precision="fp32", accumulation=1, threshold=0, **budgets, **STREAMED)
    with tiering.initialize(model=model, config=settings).engine as engine:
        planned = engine.plan.workload.gradients_beside
        assert planned == 2 * vocabulary * width * 4
        for step in range(2):
            loss = engine(tokens_of(step))
            before = resident("VmRSS")
            # Forgets the peak so far.
            Path("/proc/self/clear_refs").write_text("5")
            engine.backward(loss)
            peak = resident("VmHWM")
            engine.step()
    return planned, peak - before


def test_backward_holds_no_more_than_the_plan_says(nvme: Path) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        planned, grown = pool.submit(growth, nvme).result()
    assert planned / 2 < grown < 1.1 * planned
