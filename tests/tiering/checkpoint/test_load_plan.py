"""The plan to load a checkpoint, which ``tiering inspect`` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tiering.checkpoint.manifest import Manifest, StoredParameter
from tiering.commands.load_plan import configuration, plan_to_load
from tiering.config import ds_config
from tiering.placement.budgets import resolve_budgets


def manifest(parameters: Mapping[str, StoredParameter], **changes: Any) -> Manifest:
    usual: dict[str, Any] = {
        "run": "",
        "step": 1,
        "world_size": 1,
        "created": "",
        "optimizer": "Adam",
        "precision": "bf16",
        "kinds": ("exp_avg", "exp_avg_sq"),
        "files": {},
        "training": {},
    }
    return Manifest(parameters=parameters, **(usual | changes))


def blocks(count: int, *, trained: bool = True) -> dict[str, StoredParameter]:
    """Of 1,000,000 elements each, with an embedding of 5,000,000."""
    shapes = {f"model.layers.{index}.mlp.weight": (1000, 1000) for index in range(count)}
    shapes |= {"model.embed.weight": (5000, 1000), "model.norm.weight": (1000,), "model.scale": (200_000,)}
    return {name: StoredParameter(shape, "F32", trained, 1) for name, shape in shapes.items()}


def test_the_plan_counts_what_training_needs(tmp_path: Path) -> None:
    report = plan_to_load(manifest(blocks(8)), tmp_path)
    assert report.plan is not None
    names = [group.name for group in report.workload.groups]
    assert names == [*(f"model.layers.{index}" for index in range(8)), "model.embed", "persistent", "root"]
    numel = 8 * 10**6 + 5 * 10**6 + 200_000 + 1000
    padding = 2048 * len(names)
    for kinds, itemsize in ((report.plan.state_bytes(), 2 + 2 + 12),):
        assert numel * itemsize <= kinds <= (numel + padding) * itemsize
    frozen = plan_to_load(manifest(blocks(8, trained=False)), tmp_path)
    assert frozen.plan is not None
    excluded = plan_to_load(manifest({}, excluded=blocks(8, trained=False)), tmp_path)
    assert excluded.plan is not None
    # But for the budgets, which are what the machine has free at that moment.
    assert replace(excluded.plan, budgets=frozen.plan.budgets) == frozen.plan
    assert numel * 2 <= frozen.plan.state_bytes() <= (numel + padding) * 2
    codes = {name: replace(each, dtype="U8") for name, each in blocks(8, trained=False).items()}
    of_bytes = plan_to_load(manifest(codes), tmp_path)
    assert of_bytes.plan is not None
    assert numel <= of_bytes.plan.state_bytes() <= numel + 2 * padding


@pytest.mark.parametrize(
    ("optimizer", "kinds", "precision", "itemsize"),
    [
        ("Adam", ("exp_avg", "exp_avg_sq"), "fp32", 4 + 4 + 8),
        ("AdamW", ("exp_avg", "exp_avg_sq"), "fp16", 2 + 2 + 12),
        ("Lion", ("exp_avg",), "bf16", 2 + 2 + 8),
        ("SGD", (), "bf16", 2 + 2 + 4),
        ("SGD", ("momentum_buffer",), "bf16", 2 + 2 + 8),
        ("Adafactor", ("a", "b", "c"), "bf16", 2 + 2 + 16),
        (None, (), "fp32", 4 + 4 + 8),  # weights of somebody else, to be trained by AdamW
    ],
)
def test_the_plan_is_of_the_optimizer_that_was_saved(
    tmp_path: Path, optimizer: str | None, kinds: tuple[str, ...], precision: str, itemsize: int
) -> None:
    saved = manifest(
        {"a.0.weight": StoredParameter((2048, 1000), "F32", True, 1)},
        optimizer=optimizer,
        kinds=kinds,
        precision=precision,
    )
    report = plan_to_load(saved, tmp_path)
    assert report.plan is not None
    assert report.plan.state_bytes() == 2048 * 1000 * itemsize
    config, _ = ds_config.load(configuration(saved, tmp_path))  # which loads as it is
    assert config.precision == precision
    assert config.zero.swap_directories == (tmp_path,)
    assert config.optimizer is not None
    assert config.optimizer.decoupled is (optimizer != "Adam")


def test_budgets_are_this_machines(tmp_path: Path) -> None:
    report = plan_to_load(manifest(blocks(2)), tmp_path, gpu_memory=8 << 30)
    config, _ = ds_config.load(configuration(manifest(blocks(2)), tmp_path))
    mine = resolve_budgets(config.tiering, device_memory=8 << 30, nvme_paths=[tmp_path])
    assert report.budgets.device == mine.device == 4 << 30
    assert abs(report.budgets.host / mine.host - 1) < 0.5
