"""Optimizer state that a GPU updates: what lives there, and what visits it. The GPU is a fake, which misses no wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiering
from tests.fakes.fake_device import FakeDevice
from tests.fakes.gpu.streams import Answers, FakeEvent, at_once, by_chance, never
from tiering.placement.workload import Tier
from zero3.engine.engine import Engine
from zero3.optimizer.device_update import ROUNDS, DeviceUpdate
from zero3.optimizer.tiered import TieredOptimizer

Train = Callable[..., Any]
Start = Callable[..., Engine]
Differing = Callable[..., list[str]]

SMALL_TILES = {"sub_group_size": 4096}  # several for each slot
ON_HOST = {"offload_param": "cpu", "offload_optimizer": "cpu", **SMALL_TILES}
STATE_ON_HOST = {"offload_optimizer": "cpu", **SMALL_TILES}
GRADIENTS_LEAVE = {"device_budget": "500KiB"}  # there is no room for them beside the slots
SOME_ON_NVME = {"offload_param": "nvme", "offload_optimizer": "nvme", "host_budget": "2MiB", **SMALL_TILES}
SPLIT = {"state": "split"}
STATELESS = {"precision": "fp32", "rule": "SGD", "optimizer": {"lr": 1e-2}}
IN_BACKWARD = {"step_in_backward": True, "clip": 0, "accumulation": 1}

CPU, VISIT, STAYS = "by the CPU", "visiting the device", "in device memory"
# How it is placed, how it trains, and where its state is updated.
PLACEMENTS: dict[str, tuple[dict[str, Any], dict[str, Any], set[str]]] = {
    "half": ({**ON_HOST, **GRADIENTS_LEAVE, "update_on_device": 0.5}, {}, {CPU, VISIT}),
    "all of it, fp32": ({**ON_HOST, "update_on_device": 1.0}, {"precision": "fp32"}, {VISIT}),
    "parameters stay": ({**STATE_ON_HOST, "update_on_device": 1.0}, {}, {VISIT}),
    # Without any state nothing comes back, and gradients alone visit.
    "parameters stay, no state": (
        {**STATE_ON_HOST, "update_on_device": 1.0},
        STATELESS,
        set(),
    ),
    "parameters stay, split": ({**STATE_ON_HOST, "update_on_device": 0.6}, SPLIT, {CPU, VISIT}),
    "a share stays": ({**ON_HOST, "ratio": 0.6, "update_on_device": 0.5}, SPLIT, {CPU, VISIT, STAYS}),
    "a share stays, fp32": (
        {**ON_HOST, "ratio": 0.6, "update_on_device": 0.5},
        {"precision": "fp32"},
        {CPU, VISIT, STAYS},
    ),
    "all state stays": ({"offload_param": "cpu", **SMALL_TILES}, {}, {STAYS}),
    "some on nvme": ({**SOME_ON_NVME, "update_on_device": 1.0}, {}, {CPU, VISIT}),
    "room for few": ({**ON_HOST, "device_budget": "250KiB", "update_on_device": 1.0}, {}, {VISIT}),
    "in backward": (
        {**ON_HOST, **GRADIENTS_LEAVE, "update_on_device": 0.5},
        IN_BACKWARD,
        {CPU, VISIT},
    ),
    "in backward, parameters stay": ({**STATE_ON_HOST, "update_on_device": 0.5}, IN_BACKWARD, {CPU, VISIT}),
    "in backward, a share stays": (
        {**ON_HOST, "ratio": 0.6, "update_on_device": 0.5},
        IN_BACKWARD,
        {CPU, VISIT, STAYS},
    ),
    "in backward, some on nvme": ({**SOME_ON_NVME, "update_on_device": 1.0}, IN_BACKWARD, {CPU, VISIT}),
}
ANSWERS: dict[str, Answers] = {"never": never, "by chance": by_chance(5), "at once": at_once}
FAST = {
    ("half", "never"),
    ("parameters stay", "never"),
    ("parameters stay, split", "never"),
    ("all state stays", "never"),
    ("room for few", "at once"),
    ("in backward, some on nvme", "by chance"),
    ("in backward, a share stays", "never"),
    ("in backward, parameters stay", "never"),
}


@pytest.fixture(autouse=True)
def exact_sqrt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's square root in torch is not rounded correctly, a GPU's is."""
    sqrt = Tensor.sqrt
    monkeypatch.setattr(Tensor, "sqrt", lambda tensor: sqrt(tensor.double()).float())


def on_gpu(answers: Answers, train: Train, *args: Any, **options: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch, FakeDevice(answers) as gpu:
        gpu.run_engines(patch)
        return train(*args, **options)


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("placement", "answers"),
    [
        pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)
        for case in ((placement, answers) for placement in PLACEMENTS for answers in ANSWERS)
    ],
)
def test_the_bits_are_those_of_the_cpu_wherever_state_is_updated(
    train: Train, differing: Differing, placement: str, answers: str
) -> None:
    tiers, habit, updated = PLACEMENTS[placement]
    reference = train(2, **habit)
    run = on_gpu(ANSWERS[answers], train, 2, **tiers, **habit)
    assert set(run.engine.plan.updated()) == updated
    assert (run.engine.plan.update_window.slots == 2) == (placement == "room for few")
    assert differing(run.masters, reference.masters) == []
    assert differing(run.weights, reference.weights) == []
    assert run.norms == reference.norms


class Branches(nn.Module):
    """One group in which parameters take turns to have gradients: a tile has some that are stepped, and some not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.parts = nn.ParameterList(torch.randn(30, 40) for _ in range(5))

    def forward(self, x: Tensor, used: int) -> Tensor:
        return torch.stack([(part * x).float().pow(2).sum() for part in self.parts[used::2]]).sum()


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_parameters_without_a_gradient_stay_as_they_are(
    start: Start, differing: Differing, precision: str
) -> None:
    def trained(**options: Any) -> dict[str, Tensor]:
        engine = start(Branches(), accumulation=1, precision=precision, threshold=0, **options)
        x = torch.linspace(-1, 1, 40, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
        for step in range(4):
            engine.backward(engine(x, step % 2))
            engine.step()
        state = left_by(engine)
        engine.close()
        return state

    tiers = {**ON_HOST, "update_on_device": 1.0}
    assert differing(on_gpu(never, trained, **tiers), trained()) == []


def left_by(engine: Engine) -> dict[str, Tensor]:
    """All that a step has made."""
    names = engine.master_state_dict().keys()
    state = {
        f"{name} {key}": engine.get_fp32_state(name, key) for name in names for key in engine.state_names
    }
    return (
        state
        | engine.master_state_dict()
        | {f"{name} 16": each for name, each in engine.state_dict().items()}
    )


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("tiers", "habit"),
    [
        ({**ON_HOST, **GRADIENTS_LEAVE}, {}),
        (ON_HOST, {"accumulation": 2}),
        ({"offload_optimizer": "cpu"}, SPLIT),  # fewer tiles than slots
        (STATE_ON_HOST, STATELESS),
    ],
    ids=["one", "two", "parameters stay", "no state"],
)
def test_who_uses_what_is_on_its_way_back_waits_for_it(
    start: Start,
    differing: Differing,
    micro_batches: Callable[..., Iterator[tuple[Tensor, Tensor]]],
    tmp_path: Path,
    tiers: dict[str, Any],
    habit: dict[str, Any],
) -> None:
    """Before a step, an evaluation that nobody looks at, as nobody does at the loss without accumulation. Right after
    it an evaluation, a save, what names read, and parameters in place.
    """

    def trained(directory: Path, **options: Any) -> list[dict[str, Tensor]]:
        engine = start(**({"accumulation": 1} | habit | options))
        accumulation = engine.settings.gradient_accumulation_steps
        states = []
        uses: list[Callable[[int], object]] = [
            lambda step: None,
            lambda step: engine.save_checkpoint(directory, f"at {step}"),
            lambda step: states.append(left_by(engine)),
            lambda step: edited(engine),
            lambda step: engine.eval()(*next(micro_batches(1))).item(),
        ]
        for step, (tokens, targets) in enumerate(micro_batches(len(uses) * accumulation)):
            engine.train()
            loss = engine(tokens, targets)
            if accumulation > 1:
                engine.backward(loss)
            else:
                loss.backward()
            with torch.no_grad():  # nobody waits for what this reads
                engine(tokens, targets)
            engine.step()
            if (step + 1) % accumulation == 0:
                uses.pop(0)(step)
        states.append(left_by(engine))
        engine.load_checkpoint(directory)
        states.append(left_by(engine))
        engine.close()
        return states

    states = on_gpu(never, trained, tmp_path / "gpu", update_on_device=0.5, **tiers)
    for first, other in zip(states, trained(tmp_path / "cpu"), strict=True):
        assert differing(first, other) == []


def edited(engine: Engine) -> None:
    with tiering.gathered(engine.module.norm.weight, modify=True), torch.no_grad():
        engine.module.norm.weight.mul_(1.5)


@pytest.mark.slow
def test_a_step_waits_for_no_visit(
    start: Start,
    micro_batches: Callable[..., Iterator[tuple[Tensor, Tensor]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The CPU queues all of them, more tiles than there are slots, and nobody has said that any is over."""
    stepping, waited, tiles = [False], [], []
    wait, step, visit = FakeEvent.wait, TieredOptimizer.step, DeviceUpdate.run

    def waits(event: FakeEvent, timeout: float | None = None) -> int:
        waited.append(stepping[0])
        return wait(event, timeout)

    def steps(optimizer: TieredOptimizer, *args: Any, **options: Any) -> None:
        stepping[0] = True
        step(optimizer, *args, **options)
        stepping[0] = False

    monkeypatch.setattr(FakeEvent, "wait", waits)
    monkeypatch.setattr(TieredOptimizer, "step", steps)
    monkeypatch.setattr(
        DeviceUpdate, "run", lambda self, tile, *how: (tiles.append(tile), visit(self, tile, *how))
    )

    def trained() -> None:
        engine = start(accumulation=1, **{**ON_HOST, **GRADIENTS_LEAVE, "update_on_device": 1.0})
        for tokens, targets in micro_batches(2):
            engine.backward(engine(tokens, targets))
            engine.step()
        assert (
            len(tiles) == 2 * len(engine.plan.sub_groups) > 4 * ROUNDS * engine.plan.update_window.slots / 2
        )
        window = engine.optimizer.stepper._visits._memory
        assert window.tensor.numel() == engine.plan.contents(Tier.DEVICE)["update window"]
        engine.close()
        assert window.tensor is None  # whoever keeps the optimizer keeps none of the device's memory

    on_gpu(never, trained)
    assert waited and not any(waited)
