"""What training loops do between two steps: each habit gives the plain loop's results, to the bit wherever state is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zero3.inside import wait_for_transfers
from tests.zero3.plain import (
    STREAMED,
    Loop,
    Tower,
    assert_same,
    assert_same_everywhere,
    by_its_own,
    differing,
    inputs,
    run_engine,
    update,
)
from tiering.placement.workload import Tier

PRECISIONS = ["fp32", "bf16"]
Start = Callable[..., Any]


def plainly(loop: Loop) -> list[float]:
    return [update(loop, x) for x in inputs(4)]


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    norms = [p for name, p in named if ".0." in name]
    biases = [p for name, p in named if ".0." not in name and name.endswith("bias")]
    weights = [p for name, p in named if ".0." not in name and name.endswith("weight")]
    return [
        {"params": weights, "weight_decay": 0.5},
        {"params": biases, "weight_decay": 0.0, "lr": 3e-2},
        {"params": norms, "weight_decay": 0.0, "betas": (0.5, 0.9), "eps": 1e-2},
    ]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_param_groups_with_settings_of_their_own(start: Start, precision: str) -> None:
    run = assert_same_everywhere(start, Tower, plainly, precision=precision, groups=decay_groups)
    alike = run_engine(start, Tower, plainly, precision=precision)
    assert len(differing(run.masters, alike.masters)) == len(run.masters), "the settings make no difference"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_frozen_parameters_stay_as_they_are(start: Start, precision: str) -> None:
    def build() -> nn.Module:
        model = Tower()
        model.blocks[1].requires_grad_(False)  # a group with nothing to train, in the middle
        model.into.bias.requires_grad_(False)  # one that shares its group
        model.get_submodule("blocks.0.1").weight.requires_grad_(False)
        return model

    run = assert_same_everywhere(start, build, plainly, precision=precision)
    torch.manual_seed(11)
    original = build().to(torch.bfloat16 if precision == "bf16" else torch.float32).state_dict()
    frozen = set(original) - set(run.masters)
    assert len(frozen) == 8
    for name in frozen:
        assert torch.equal(run.state[name], original[name]), name


class Adapted(nn.Module):
    """A frozen layer with a low-rank update beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.a, self.b = nn.Linear(width, 1, bias=False), nn.Linear(1, width, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.b(self.a(x)))


class LowRank(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted(width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.repeat(1, 8).to(torch.bfloat16)
        for layer in self.layers:
            x = layer(x)
        return x.float().pow(2).mean()


class AfterEmbedding(LowRank):
    """Adapters after a frozen embedding whose output requires a gradient, as ``enable_input_require_grads`` sets it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 256).requires_grad_(False)
        self.embedding.register_forward_hook(lambda module, args, output: output.requires_grad_(True))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding((x.abs() * 10).long().sum(-1) % 512)
        for layer in self.layers:
            x = layer(x)
        return x.float().pow(2).mean()


def test_a_frozen_embedding_is_read_in_forward_only(start: Start) -> None:
    engine = start(AfterEmbedding(), accumulation=1, threshold=0, **STREAMED)
    load = engine.plan.workload
    assert {group.name: group.unshards for group in load.groups if "embedding" in group.name} == {
        "embedding": 1
    }
    moved = moved_by(engine)
    assert moved[3][0] - moved[1][0] == 2 * engine.plan.nvme_traffic()[0] > 0


def moved_by(engine: Any) -> list[tuple[int, int]]:
    """The bytes that NVMe has read and written after each of four updates."""
    moved = []
    for x in inputs(4):
        update(engine, x)
        wait_for_transfers(engine)
        (path,) = engine.snapshot().io
        moved.append((path.read.bytes, path.written.bytes))
    return moved


def test_low_rank_adapters(start: Start) -> None:
    """99 % is frozen: it has no optimizer state and is never written after it was placed."""
    reference = assert_same_everywhere(start, LowRank, plainly, precision="bf16")
    engine = start(LowRank(), accumulation=1, threshold=0, **STREAMED)
    trained = sum(p.numel() for p in engine.module.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in engine.module.parameters() if not p.requires_grad)
    assert frozen > 99 * trained
    in_pages = 3 * 4096 // 2  # each layer's 512 trained elements, rounded up to a page of bfloat16
    assert engine.plan.contents(Tier.NVME)["optimizer state"] == 12 * in_pages

    moved = moved_by(engine)
    read, written = engine.plan.nvme_traffic()
    assert moved[3][0] - moved[1][0] == 2 * read
    assert moved[3][1] - moved[1][1] == 2 * written
    assert written == (12 + 2) * in_pages < 2 * frozen

    # With room for the adapters, but not for a frozen layer beside them, nothing is written.
    with_room = {**STREAMED, "cache_in_host": True, "host_budget": "300KiB", "threshold": 0}
    engine = start(LowRank(), precision="bf16", accumulation=1, **with_room)
    assert set(engine.plan.contents(Tier.NVME)) == {"parameters"}
    assert engine.plan.contents(Tier.HOST)["optimizer state"] == 12 * in_pages
    moved = moved_by(engine)
    assert moved[3][0] - moved[1][0] == 2 * engine.plan.nvme_traffic()[0] > 0
    assert moved[3][1] == moved[0][1]
    assert_same(run_engine(start, LowRank, plainly, precision="bf16", **with_room), reference, "host memory")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_blocks_skipped_in_some_steps(start: Start, precision: str) -> None:
    """A parameter without gradient keeps its state and its step count, as torch's optimizers do."""

    def script(loop: Loop) -> list[float]:
        order = [0, 0, 1, None, 2, 1, None]
        return [update(loop, x, skip=skip) for x, skip in zip(inputs(7), order, strict=True)]

    assert_same_everywhere(start, Tower, script, precision=precision)


def test_evaluation_between_steps(start: Start) -> None:
    def script(loop: Loop, evaluate: bool = True) -> list[float]:
        losses = []
        for x in inputs(4):
            if evaluate:
                loop.eval()
                with torch.no_grad():
                    without = loop(x).item()
                with torch.inference_mode():
                    assert loop(x).item() == without
                loop.train()
            losses.append(update(loop, x))
            if evaluate:
                assert losses[-1] == without
                with torch.inference_mode():
                    losses.append(loop(x).item())
        return losses

    run = assert_same_everywhere(start, Tower, script, precision="bf16")
    undisturbed = run_engine(start, Tower, lambda loop: script(loop, evaluate=False), precision="bf16")
    assert differing(run.masters, undisturbed.masters) == []


def test_evaluation_between_a_forward_and_its_backward(start: Start) -> None:
    def script(loop: Loop) -> list[float]:
        losses = []
        for x in inputs(4):
            loss = loop(x)
            with torch.no_grad():
                losses.append(loop(-x).item())
            loop.backward(loss)
            with torch.inference_mode():
                losses.append(loop(2 * x).item())
            loop.step()
        return losses

    assert_same_everywhere(start, Tower, script, precision="bf16")


def test_a_forward_without_backward(start: Start) -> None:
    def script(loop: Loop, idle: bool = True) -> list[float]:
        losses = []
        for x in inputs(4):
            outputs = [loop(x, skip=1), loop(-x)] if idle else []
            losses.append(update(loop, x))
            del outputs
        return losses

    run = assert_same_everywhere(start, Tower, script)
    undisturbed = run_engine(start, Tower, lambda loop: script(loop, idle=False))
    assert run.losses == undisturbed.losses
    assert differing(run.masters, undisturbed.masters) == []


@pytest.mark.parametrize("order", ["older first", "newer first", "sum", "one after the other's part"])
def test_two_forwards_before_their_backwards(start: Start, order: str) -> None:
    def script(loop: Loop) -> list[float]:
        losses = []
        for x in inputs(4):
            older, newer = loop(x, skip=0), loop(-2 * x, skip=2)
            losses += [older.item(), newer.item()]
            if order == "older first":
                loop.backward(older)
                loop.backward(newer)
            elif order == "newer first":
                loop.backward(newer)
                loop.backward(older)
            elif order == "sum":
                loop.backward(older + newer)
            else:
                loop.backward(older * newer.detach())
                loop.backward(newer)
            loop.step()
        return losses

    assert_same_everywhere(start, Tower, script, precision="bf16")


def test_the_losss_own_backward(start: Start) -> None:
    run = assert_same_everywhere(start, Tower, by_its_own, precision="bf16")
    engines = run_engine(start, Tower, plainly, precision="bf16")
    assert differing(run.masters, engines.masters) == []


def test_a_loss_that_the_engine_has_scaled(start: Start) -> None:
    """``engine.scale(loss).backward()``, for loops that must call backward themselves."""

    def script(engine: Any, scaled: bool) -> list[float]:
        losses = []
        for x in inputs(6):
            loss = engine(x)
            losses.append(loss.item())
            if scaled:
                engine.scale(loss).backward()
            else:
                engine.backward(loss)
            engine.step()
        return losses

    for placement in ({}, STREAMED):
        options = {"precision": "bf16", "accumulation": 2, **placement}
        run = run_engine(start, Tower, partial(script, scaled=True), **options)
        engines = run_engine(start, Tower, partial(script, scaled=False), **options)
        assert run.losses == engines.losses
        assert differing(run.masters, engines.masters) == []


def test_a_graph_kept_for_a_second_backward(start: Start) -> None:
    def script(loop: Loop) -> list[float]:
        losses = []
        for x in inputs(4):
            loss = loop(x)
            losses.append(loss.item())
            loop.backward(loss, retain_graph=True)
            loop.backward(0.5 * loss)
            loop.step()
        return losses

    assert_same_everywhere(start, Tower, script, precision="bf16")


def test_gradients_asked_for_by_autograd_grad(start: Start) -> None:
    """They are returned, and accumulate nowhere."""

    def script(loop: Loop, ask: bool = True) -> list[float]:
        norms = []
        for x in inputs(4):
            x.requires_grad_()
            if ask:
                sources = [x, *loop.module.parameters()]
                norms += [float(g.double().norm()) for g in torch.autograd.grad(loop(x), sources)]
            loss = loop(x)
            if ask:
                (of_input,) = torch.autograd.grad(loss, x, retain_graph=True)
                norms.append(float(of_input.norm()))
            norms.append(loss.item())
            loop.backward(loss)
            loop.step()
        return norms

    run = assert_same_everywhere(start, Tower, script)
    undisturbed = run_engine(start, Tower, lambda loop: script(loop, ask=False))
    assert differing(run.masters, undisturbed.masters) == []


def test_autocast_over_a_model_kept_in_fp32(start: Start) -> None:
    ran_in = set()

    def script(loop: Loop) -> list[float]:
        losses = []
        loop.module.get_submodule("blocks.1.2").register_forward_hook(
            lambda *arguments: ran_in.add(arguments[2].dtype)
        )
        for number, x in enumerate(inputs(5)):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loop(x, skip=number % 4)
                if number == 2:
                    with torch.no_grad():
                        losses.append(loop(-x).item())
            losses.append(loss.item())
            loop.backward(loss)
            loop.step()
        return losses

    run = assert_same_everywhere(start, Tower, script)
    assert ran_in == {torch.bfloat16}
    assert {value.dtype for value in run.state.values()} == {torch.float32}


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3),
    "LambdaLR": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "CosineAnnealingLR": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4),
    "OneCycleLR moves the betas too": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=2e-2, total_steps=8
    ),
    "ReduceLROnPlateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.1, patience=0, threshold=0.5
    ),
}


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", SCHEDULES)
def test_torchs_schedulers_called_by_the_user(start: Start, name: str) -> None:
    rates: list[list[float]] = []

    def script(loop: Loop) -> list[float]:
        scheduler = SCHEDULES[name](loop.optimizer)
        losses, rates_here = [], []
        for x in inputs(5):
            losses.append(update(loop, x))
            rates_here.append(loop.optimizer.param_groups[0]["lr"])
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step(losses[-1])
            else:
                scheduler.step()
        rates.append(rates_here)
        return losses

    assert_same_everywhere(start, Tower, script)
    assert len({*rates[0]}) > 1, "the schedule changes nothing"
    assert all(rates_of_run == rates[0] for rates_of_run in rates)
