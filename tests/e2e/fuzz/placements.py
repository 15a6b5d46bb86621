"""Where state may live, and how it moves: what must not change a bit of the result."""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from optim_cpu import kernels
from tiering.errors import PlacementError
from tiering.placement.placement import place
from tiering.placement.plan import Budgets, Plan
from tiering.placement.workload import Tier
from tiering.storage.arena import PAGE
from tiering.storage.read_ahead import StagingPipeline
from zero3.loop import step_ahead
from zero3.passes import moved_activations

from .training import Training

PLENTY = {"device_budget": "64MiB", "host_budget": "128MiB"}
ARRIVALS: dict[str, Callable[[Any, Container[Any]], Any]] = {
    "as read": StagingPipeline.first_arrived,
    "at once": lambda pipeline, tiles: next((tile for tile in pipeline._staged if tile in tiles), None),
    "late": lambda pipeline, tiles: None,
}
"""What finds a tile whose bytes have arrived; the step ahead takes another one only where it has to."""
# Of offload_param and offload_optimizer.
DEVICES = ("nvme nvme", "nvme nvme", "nvme cpu", "nvme none", "none nvme", "cpu nvme", "cpu cpu")


@dataclass(frozen=True)
class Placement:
    """A way to place and move state. The default is the reference: everything on the device."""

    param: str = "none"
    optimizer: str = "none"
    stage: int = 3
    cache_in_host: bool = False
    ratio: float = 1.0
    threshold: int = 100
    prefetch: int = 10**6
    sub_group_size: int = 10**9
    # Shares of what lies between the least budget and that for everything; 1 is without limit.
    device_share: float = 1.0
    host_share: float = 1.0
    split: bool = False
    verify: bool = False
    step: str = "after"
    versions: int = 1
    snapshots: bool = False
    # Which of the tiles whose bytes are read a step ahead takes first.
    arrives: str = "as read"
    # Steps are begun in backward however often that was in vain.
    always_ahead: bool = False
    engine: str = "auto"
    block_size: str = "1M"
    queue_depth: int = 16
    staged_seconds: float = 0.0
    staged_tile: int = 16 << 20
    paths: int = 1
    threads: int = 1
    instruction_set: str = ""
    # The first values come from files, in which frozen weights stay.
    in_files: bool = False
    activations: str = "device"
    activation_budget: int = 1 << 20
    # tiering.tile cuts the model, not the configuration.
    cut_before: bool = False

    @classmethod
    def draw(cls, rng: random.Random, training: Training) -> Placement:
        param, optimizer = rng.choice(DEVICES).split()
        versions = rng.choice((1, 1, 2))
        in_backward = (training.may_step_in_backward or versions > 1) and rng.random() < 0.8
        return cls(
            param,
            optimizer,
            stage=3 if param != "none" else rng.choice((1, 2, 3)),
            cache_in_host=rng.random() < 0.2,
            ratio=rng.choice((1.0, 1.0, 1.0, 0.5)) if optimizer != "none" else 1.0,
            threshold=rng.choice((0, 0, 100, 1000)),
            prefetch=rng.choice((0, 0, 100, 3000, 10**6)),
            sub_group_size=rng.choice((1, 500, 10**9)),
            device_share=rng.choice((0.0, 0.0, 0.1, 0.5, 1.0)),
            host_share=rng.choice((0.0, 0.0, 0.2, 0.6, 1.0)),
            split=training.splits and rng.random() < 0.5,
            verify=rng.random() < 0.15,
            engine=rng.choice(("auto", "io_uring", "threads")),
            block_size=rng.choice(("4K", "1M")),
            queue_depth=rng.choice((1, 3, 16)),
            staged_seconds=rng.choice((0.0, 0.1, 1e-6)),
            staged_tile=rng.choice((1, 5000, 16 << 20)),
            paths=rng.choice((1, 1, 1, 2)),
            threads=rng.choice((1, 1, 2)),
            instruction_set=rng.choice(("", "", *kernels.available_instruction_sets())),
            activations=rng.choice(
                ("device", "host", "auto", *(("nvme", "nvme") if "nvme" in (param, optimizer) else ()))
            ),
            # From a few saved tensors of these models to all of them.
            activation_budget=rng.choice((8 * PAGE, 16 * PAGE, 64 * PAGE, 1 << 20)),
            step="in_backward" if in_backward else rng.choices(("after", "deferred", "auto"), (6, 3, 1))[0],
            versions=versions,
            snapshots="nvme" in (param, optimizer) and rng.random() < 0.4,
            arrives=rng.choice(("as read", "at once", "late")),
            always_ahead=rng.random() < 0.7,
        )

    def may_fail(self, training: Training) -> tuple[Literal["read", "write"], ...]:
        """The kinds of transfers after whose failure an engine goes on, as documented."""
        if "nvme" not in (self.param, self.optimizer) or (self.step == "in_backward" and self.versions == 1):
            return ()
        # Masters that are themselves the parameters, or a part of them, are updated in place where they are in memory.
        rounds = training.precision != "fp32" and not self.split
        streams = (self.param, self.optimizer, self.ratio, self.threshold) == ("nvme", "nvme", 1.0, 0)
        undone = self.versions > 1 and (rounds or (streams and not self.cache_in_host))
        return ("read", "write") if undone else ("read",)

    def roomier(self) -> Placement:
        """The same with room for everything on the device, as the error says that asks for it."""
        return replace(self, device_share=1.0, prefetch=10**6)

    def config(self, training: Training, directory: Path) -> dict[str, Any]:
        """What ``initialize`` is given, with plenty of room."""
        paths = [directory / f"nvme{number}" for number in range(self.paths)]
        for path in paths:
            path.mkdir(exist_ok=True)

        def section(device: str) -> dict[str, Any]:
            return {"device": device} | (
                {"nvme_path": [str(path) for path in paths]} if device == "nvme" else {}
            )

        shared = training.config()
        return shared | {
            "zero_optimization": {
                "stage": self.stage,
                "offload_param": section(self.param),
                "offload_optimizer": section(self.optimizer)
                | ({"ratio": self.ratio} if self.ratio < 1 else {}),
                "sub_group_size": self.sub_group_size,
                "stage3_prefetch_bucket_size": self.prefetch,
                "stage3_param_persistence_threshold": self.threshold,
            },
            "tiering": shared["tiering"]
            | ({"tile": 0} if self.cut_before else {})
            | {
                "cache_in_host": self.cache_in_host,
                "state": "split" if self.split else "fp32",
                "verify": self.verify,
                "step": self.step,
                "swap_versions": self.versions,
                "snapshots": self.snapshots,
                "weights_in_place": self.in_files,
                "activations": self.activations,
                "activation_budget": self.activation_budget,
                "io": {
                    "engine": self.engine,
                    "block_size": self.block_size,
                    "queue_depth": self.queue_depth,
                },
                "staging": {"seconds": self.staged_seconds, "tile_elements": self.staged_tile},
                "telemetry": {"enabled": False},
                **PLENTY,
            },
        }

    @property
    def has_budgets(self) -> bool:
        return (self.device_share, self.host_share) != (1.0, 1.0)

    def budgets(self, plan: Plan) -> dict[str, int]:
        """The budgets of this placement, for a ``plan`` that was made with plenty."""
        least = least_budgets(plan)
        budgets = {}
        for tier, share in ((Tier.DEVICE, self.device_share), (Tier.HOST, self.host_share)):
            if share == 1.0:
                continue
            lowest: int = getattr(least, tier.value)
            budgets[f"{tier.value}_budget"] = lowest + int(share * max(0, plan.total(tier) - lowest))
        return budgets

    @contextmanager
    def machine(self) -> Iterator[None]:
        """The kernels' threads and instructions are of this placement within the block. Small activations move."""
        threads, chosen = kernels.thread_count(), kernels.instruction_set()
        settings = {
            (moved_activations, "SMALLEST"): 256,
            (StagingPipeline, "first_arrived"): ARRIVALS[self.arrives],
            (step_ahead, "MOST_IN_VAIN"): 1 if self.always_ahead else step_ahead.MOST_IN_VAIN,
        }
        before = {(owner, name): getattr(owner, name) for owner, name in settings}
        kernels.set_thread_count(self.threads)
        kernels.set_instruction_set(self.instruction_set or chosen)
        try:
            for (owner, name), value in settings.items():
                setattr(owner, name, value)
            yield
        finally:
            kernels.set_thread_count(threads)
            kernels.set_instruction_set(chosen)
            for (owner, name), value in before.items():
                setattr(owner, name, value)

    def __str__(self) -> str:
        values = [(field.name, getattr(self, field.name), field.default) for field in fields(self)]
        return ", ".join(f"{name}={value}" for name, value, usual in values if value != usual) or "device"


def least_budgets(plan: Plan) -> Budgets:
    """The least device budget in which ``plan`` could be made, and then the least host budget, to a page."""
    budgets = plan.budgets
    for tier in (Tier.DEVICE, Tier.HOST):
        too_little, enough = 0, max(1, plan.total(tier) // PAGE + 1)
        while enough - too_little > 1:
            middle = (too_little + enough) // 2
            if _is_enough(plan, replace(budgets, **{tier.value: middle * PAGE})):
                enough = middle
            else:
                too_little = middle
        budgets = replace(budgets, **{tier.value: enough * PAGE})
    return budgets


def _is_enough(plan: Plan, budgets: Budgets) -> bool:
    try:
        place(plan.workload, budgets)
    except PlacementError:
        return False
    return True
