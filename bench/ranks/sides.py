"""The sides by name: what each case starts."""

from __future__ import annotations

from typing import Any

from frame.reference_model import Model
from frame.side import Spec


def ours(model: Model, world_size: int, stage: int, precision: str) -> Spec:
    """Nothing offloaded; budgets are left to the engine."""
    settings = {"stage": stage, "precision": precision}
    name = f"ours, stage {stage}, {precision}"
    return Spec(name, "ranks.ours", model, settings, on_disk=True, ranks=world_size)


def fsdp(model: Model, world_size: int, precision: str) -> list[Spec]:
    """The configurations of which the fastest counts: as it comes, with gathers that do not block, and with parameters
    that stay gathered until backward, as ours do where there is room; in bf16 with gradients that travel in fp32, as
    its documentation advises, and in bf16, as ours do."""
    ways = [
        (reduce, ahead, whole)
        for reduce in dict.fromkeys(("fp32", precision))
        for ahead, whole in ((False, False), (True, False), (True, True))
    ]
    specs = []
    for reduce, ahead, whole in ways:
        parts = ["FSDP2", precision]
        parts += [f"{reduce} reduction"] if precision != "fp32" else []
        parts += ["gathers ahead"] if ahead else []
        parts += ["no reshard after forward"] if whole else []
        settings = {"precision": precision, "reduce": reduce, "ahead": ahead, "whole": whole}
        specs.append(Spec(", ".join(parts), "ranks.fsdp", model, settings, ranks=world_size))
    return specs


def stage_2_of_fsdp(model: Model, world_size: int) -> Spec:
    settings = {"precision": "fp32", "reduce": "fp32", "ahead": True, "whole": True}
    name = "FSDP2 without reshard after forward, fp32"
    return Spec(name, "ranks.fsdp", model, settings, ranks=world_size)


def ddp(model: Model, world_size: int, *, sharded: bool) -> Spec:
    name = "DDP with ZeroRedundancyOptimizer, fp32" if sharded else "DDP, fp32"
    return Spec(name, "ranks.ddp", model, {"sharded": sharded}, ranks=world_size)


SPILL = {"cache_in_host": False}  # what offload names nvme lives there whole
PERSISTENT = 5000  # elements: so that the smallest model has parameters of both kinds in stage 3

OFFLOADS: dict[str, dict[str, Any]] = {
    "none": {},
    "optimizer: cpu": {"offload": {"offload_optimizer": "cpu"}},
    "optimizer: nvme": {"offload": {"offload_optimizer": "nvme"}, "tiering": SPILL},
    "optimizer and param: cpu": {"offload": {"offload_optimizer": "cpu", "offload_param": "cpu"}},
    "optimizer and param: nvme": {
        "offload": {"offload_optimizer": "nvme", "offload_param": "nvme"},
        "tiering": SPILL,
    },
}


def every_stage() -> dict[tuple[int, str], dict[str, Any]]:
    """Settings of all stages with all offloads that they allow."""
    allowed = {0: ["none"], 1: list(OFFLOADS)[:3], 2: list(OFFLOADS)[:3], 3: list(OFFLOADS)}
    return {
        (stage, offload): {"stage": stage, "precision": "bf16", "persistent": PERSISTENT, **OFFLOADS[offload]}
        for stage, offloads in allowed.items()
        for offload in offloads
    }
