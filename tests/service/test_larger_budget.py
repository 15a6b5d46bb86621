"""The larger budget that advice names: what it promises comes true, in plans and in an engine."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiering
from service.advice.larger_budget import larger_budget
from service.status_files import StatusFiles
from service.view import RankView
from service.watch import Watch
from tests.tiering.workloads import MIB, PLENTY, budgets, example, planned, workloads
from tiering.config.training import parse_size
from tiering.demo.model import GPT
from tiering.placement.group_sizes import GroupSizes
from tiering.placement.placement import make_plan
from tiering.placement.plan import Budgets

from .advised_runs import GIB, bound, of, steps
from .processes import until


@settings(max_examples=40, deadline=None)
@given(workloads(), budgets, st.integers(0, 400 * MIB))
def test_a_plan_with_the_named_budget_keeps_the_named_kinds(load: Any, limits: Budgets, free: int) -> None:
    plan = planned(load, limits)
    load = replace(load, cache_in_host=True)
    more = larger_budget(plan.status(0), free)
    if more is None:
        return
    assert more.extra <= free
    then = make_plan(load, replace(plan.budgets, host=more.host_budget)).status(0)
    for kind in more.whole:
        assert not then.read.get(kind, 0) + then.written.get(kind, 0)
    if more.saved == more.moved:
        assert not sum(then.read.values()) + sum(then.written.values())


@pytest.mark.parametrize("free", [1 * GIB, 2 * GIB, 3 * GIB])
def test_what_a_part_saves_is_what_a_plan_then_saves(free: int) -> None:
    """A model of 24 blocks with 4 GB of state, of which some more fits."""
    groups = tuple(GroupSizes(f"layers.{i}", 2 * 12 * MIB, 12 * MIB) for i in range(24))
    load = example(groups=groups, cache_in_host=True, sub_group_numel=10**9)
    plan = make_plan(load, Budgets(PLENTY, 600 * MIB, PLENTY))
    more = larger_budget(plan.status(0), free)
    assert more is not None and 0 < more.saved < more.moved
    saved = sum(plan.nvme_traffic()) - sum(
        make_plan(load, replace(plan.budgets, host=more.host_budget)).nvme_traffic()
    )
    assert more.saved <= saved <= 1.25 * more.saved + 500 * MIB


def step_shown(home: Path) -> int:
    (run,) = Watch(StatusFiles(home / "run")).view().runs
    return max(snapshot.step for snapshot in run.snapshots)


def train(home: Path, host_budget: str, width: int, count: int) -> tuple[RankView, Callable[[], None]]:
    """A real engine after ``count`` steps, as its page shows it, and its end."""
    torch.manual_seed(0)
    swap = {"device": "nvme", "nvme_path": str(home)}
    engine = tiering.initialize(
        model=GPT(width=width, layers=3, heads=4, sequence=16),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 3, "offload_param": swap, "offload_optimizer": swap},
            "tiering": {"host_budget": host_budget, "telemetry": {"dir": str(home / "run")}},
        },
    ).engine
    tokens = torch.randint(256, (1, 17))
    for _ in range(count):
        engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
        engine.step()
    until(lambda: step_shown(home) == count)
    (run,) = Watch(StatusFiles(home / "run")).view().runs
    (shown,) = run.ranks
    return shown, engine.close


def named_budget(shown: RankView) -> str:
    (advice,) = [advice for advice in of(shown) if advice.code == "nvme-bound"]
    named = re.search(r'set tiering.host_budget to "(\w+)"', advice.remedy)
    assert named is not None, advice.remedy
    return named[1]


def on_nvme(shown: RankView) -> int:
    assert shown.snapshot is not None
    return sum(tier.used for tier in shown.snapshot.tiers if tier.name == "nvme")


def test_an_engine_with_the_named_budget_has_nothing_on_nvme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERING_DEVICE", "cpu")
    shown, end = train(tmp_path, "3MiB", 128, 1)
    end()
    assert shown.snapshot is not None and on_nvme(shown) > 3 * MIB
    # How long such a small model waits is the disk's mood: here most of the step is declared as stall.
    waits = replace(shown, snapshot=replace(shown.snapshot, steps=steps(*[2.0] * 3, **bound)))
    budget = named_budget(waits)
    assert parse_size(budget) < 3 * on_nvme(shown)
    then, end = train(tmp_path, budget, 128, 1)
    end()
    assert on_nvme(then) == 0


@pytest.mark.slow
def test_who_follows_the_advice_waits_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with 120 MB of state, most of it on NVMe: its steps stall, and with the named budget they do not."""
    monkeypatch.setenv("TIERING_DEVICE", "cpu")
    shown, end = train(tmp_path, "64MiB", 640, 8)
    end()
    if "nvme-bound" not in {advice.code for advice in of(shown)}:
        pytest.skip("this machine's disk keeps up with the model: there is nothing to advise")
    then, end = train(tmp_path, named_budget(shown), 640, 8)
    end()
    assert on_nvme(then) == 0 < on_nvme(shown)
    assert "nvme-bound" not in {advice.code for advice in of(then)}
