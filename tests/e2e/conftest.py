"""How a model is trained on any placement, for tests of what it gives."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

# Before anything imports transformers: no test here may reach for the network.
os.environ["HF_HUB_OFFLINE"] = "1"

import tiering
from tiering.errors import PlacementError
from tiering.placement.placement import place
from tiering.placement.plan import Plan
from tiering.placement.workload import Tier
from tiering.storage.arena import PAGE
from tiering.telemetry import Snapshot
from zero3.engine.engine import Engine

from .architectures import batches, build

STEPS = 4
COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}}


@dataclass(frozen=True)
class Habit:
    """How a user trains, wherever the state lives."""

    precision: str
    accumulation: int
    checkpointing: str = "no"  # or "reentrant", "not reentrant"
    block_rows: int | None = None

    def __str__(self) -> str:
        return f"{self.precision}-{self.accumulation}-{self.checkpointing}-{self.block_rows}"

    def build(self, name: str) -> Any:
        model = build(name)
        if self.checkpointing != "no":
            model.gradient_checkpointing_enable({"use_reentrant": self.checkpointing == "reentrant"})
        return model


@dataclass
class Trained:
    """What a run left behind."""

    losses: list[float]
    norms: list[float | None]
    weights: dict[str, Tensor]
    masters: dict[str, Tensor]
    snapshot: Snapshot
    engine: Engine = field(repr=False)

    def differing(self, other: Trained) -> list[str]:
        """The names of weights and masters that are not the same on both sides, to the bit."""
        assert list(self.weights) == list(other.weights)
        assert set(self.masters) == set(other.masters)
        pairs = [(name, value, other.weights[name]) for name, value in self.weights.items()]
        pairs += [(f"master of {name}", value, other.masters[name]) for name, value in self.masters.items()]
        return [name for name, first, second in pairs if not _bytes(first).equal(_bytes(second))]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def settings(
    nvme: Path,
    habit: Habit,
    *,
    optimizer: dict[str, Any] | None = None,
    offload_param: str = "none",
    offload_optimizer: str = "none",
    ratio: float = 1.0,
    prefetch: int = 10**6,
    threshold: int = 100,
    **tiers: Any,
) -> dict[str, Any]:
    """A configuration as a user writes it; keyword arguments left over go to the ``tiering`` block."""

    def section(device: str) -> dict[str, Any]:
        return {"device": device} | ({"nvme_path": str(nvme)} if device == "nvme" else {})

    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": habit.accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": habit.precision == "bf16"},
        "optimizer": optimizer or ADAMW,
        "zero_optimization": {
            "stage": 3,
            "offload_param": section(offload_param),
            "offload_optimizer": {**section(offload_optimizer), "ratio": ratio},
            "stage3_prefetch_bucket_size": prefetch,
            "stage3_param_persistence_threshold": threshold,
        },
        "tiering": {"device_budget": "16MiB", "host_budget": "64MiB", "telemetry": {"enabled": False}}
        | {"block_rows": habit.block_rows}
        | tiers,
    }


def fewest_and_plenty(plan: Plan, tier: Tier) -> tuple[int, int]:
    """The fewest pages of ``tier`` that what was planned fits in, and how many it takes when there is plenty."""
    refused, accepted = 0, (plenty := plan.total(tier) // PAGE)
    while accepted - refused > 1:
        middle = (refused + accepted) // 2
        try:
            place(plan.workload, replace(plan.budgets, **{tier.value: middle * PAGE}))
        except PlacementError:
            refused = middle
        else:
            accepted = middle
    return accepted, plenty


@pytest.fixture(scope="session")
def _pages() -> dict[str, tuple[int, int]]:
    """What searches for budgets have found: the fewest pages that are accepted, and how many are plenty."""
    return {}


@pytest.fixture
def start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, _pages: dict[str, tuple[int, int]]
) -> Iterator[Callable[..., Engine]]:
    """``start(name, habit, **config)`` makes an engine of an architecture; it is closed after the test.

    ``host_share`` and ``device_share`` stand for a budget between the smallest that the plan accepts (0) and what it
    takes when there is plenty (1).
    """
    monkeypatch.setenv("TIERING_DEVICE", "cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # these models are too small to share out
    engines: list[Engine] = []

    def initialize(name: str, habit: Habit, options: dict[str, Any]) -> Engine:
        config = settings(tmp_path, habit, **options)
        return tiering.initialize(model=habit.build(name), config=config).engine

    def pages(tier: Tier, name: str, habit: Habit, options: dict[str, Any]) -> tuple[int, int]:
        key = repr((tier, name, replace(habit, checkpointing="no"), sorted(options.items())))
        if key not in _pages:
            engine = initialize(name, habit, options)
            engine.close()
            _pages[key] = fewest_and_plenty(engine.plan, tier)
        return _pages[key]

    def make(name: str, habit: Habit, **options: Any) -> Engine:
        shares = {tier: options.pop(f"{tier.value}_share", None) for tier in (Tier.HOST, Tier.DEVICE)}
        for tier, share in shares.items():
            if share is not None:
                fewest, plenty = pages(tier, name, habit, options)
                options[f"{tier.value}_budget"] = (fewest + int(share * (plenty - fewest))) * PAGE
        engine = initialize(name, habit, options)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()
    torch.set_num_threads(threads)


@pytest.fixture
def train(start: Callable[..., Engine]) -> Callable[..., Trained]:
    """``train(name, habit, **config)`` trains an architecture; ``before_step(engine, step)`` may look around."""

    def run(
        name: str,
        habit: Habit,
        before_step: Callable[[Engine, int], None] = lambda engine, step: None,
        **options: Any,
    ) -> Trained:
        engine = start(name, habit, **options)
        losses, norms = [], []
        for number, batch in enumerate(batches(name, STEPS * habit.accumulation, COMPUTE[habit.precision])):
            if number % habit.accumulation == 0:
                before_step(engine, engine.global_steps)
            loss = engine(**batch).loss
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
            if engine.micro_steps % habit.accumulation == 0:
                norms.append(engine.get_global_grad_norm())
        trained = Trained(
            losses, norms, engine.state_dict(), engine.master_state_dict(), engine.snapshot(), engine
        )
        engine.close()
        return trained

    return run


@pytest.fixture(scope="session")
def _references() -> dict[tuple[str, Habit], Trained]:
    return {}


@pytest.fixture
def reference(
    train: Callable[..., Trained], _references: dict[tuple[str, Habit], Trained]
) -> Callable[[str, Habit], Trained]:
    """``reference(name, habit)`` is what training with everything on the device gives."""

    def of(name: str, habit: Habit) -> Trained:
        if (name, habit) not in _references:
            trained = train(name, habit)
            assert len(set(trained.norms)) == STEPS, "the reference does not train"
            _references[name, habit] = trained
        return _references[name, habit]

    return of
