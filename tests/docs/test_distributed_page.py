"""The figures of docs/guide/distributed.md are what plans say."""

from __future__ import annotations

import argparse
import re
from fractions import Fraction
from pathlib import Path

import pytest

from tiering.commands.launch import LAUNCHERS, add_arguments
from tiering.placement.group_sizes import GroupSizes
from tiering.placement.placement import make_plan
from tiering.placement.plan import Budgets, Plan
from tiering.placement.workload import Tier, Workload

PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "distributed.md").read_text(encoding="utf-8")
RANKS = 8
NUMEL = RANKS * 2048 * 64
TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}


def rows(heading: str) -> list[list[str]]:
    """The table whose first line is ``heading``, without its two first lines."""
    table = PAGE.partition(f"| {heading} |\n")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]]


def test_the_table_has_every_option_of_the_launcher() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    table = "".join(row[0] for row in rows("option of `deepspeed` | `tiering launch`"))
    options = {flag for action in parser._actions for flag in action.option_strings}
    assert len(options) > 25
    assert {flag for flag in options if f"`{flag}" not in table} == {"-h", "--help", "--dry-run"}
    assert {
        name for name in LAUNCHERS if f"`{name}`" not in table and f"--launcher {name}`" not in table
    } == set()


def plan_of(stage: int, optimizer: str, param: str, micro_batches: int = 1) -> Plan:
    """bf16, AdamW, fp32 state, a device with memory of its own, as much as is asked for on every tier."""
    group = GroupSizes("blocks", 2 * NUMEL, NUMEL)
    load = Workload(
        groups=(group,),
        micro_batches=micro_batches,
        compute_itemsize=2,
        grad_itemsize=2 if micro_batches == 1 else 4,
        state_tensors=2,
        offload_param=TIERS[param],
        offload_optimizer=TIERS[optimizer],
        cache_in_host=False,
        sub_group_numel=NUMEL,
        prefetch_bytes=0,
        device_is_host=False,
        world_size=RANKS,
        stage=stage,
        reduce_itemsize=0 if stage < 2 else 2,
    )
    return make_plan(load, Budgets(1 << 33, 1 << 33, 1 << 33))


def share_on(plan: Plan, *tiers: Tier) -> Fraction:
    kinds = ("parameters", "gradients", "local gradients", "optimizer state")
    return Fraction(sum(plan.contents(tier).get(kind, 0) for tier in tiers for kind in kinds), NUMEL)


def bracketed(cell: str) -> Fraction:
    """The figure in brackets, which the summands before it have to come to."""
    if cell == "-":
        return Fraction(0)
    sums, _, figure = cell.rstrip(")").partition(" (")
    terms = [Fraction(term.replace("/W", "")) / (RANKS if "/W" in term else 1) for term in sums.split(" + ")]
    assert sum(terms) == Fraction(figure), cell
    return Fraction(figure)


@pytest.mark.parametrize("row", rows("stage | offload | device | host or NVMe"), ids=" ".join)
def test_what_a_rank_keeps(row: list[str]) -> None:
    stage, offload, device, beside = row
    for place in ["none"] if offload == "none" else ["cpu", "nvme"]:
        plan = plan_of(int(stage), place, place if "param" in offload else "none")
        assert share_on(plan, Tier.DEVICE) == bracketed(device)
        assert share_on(plan, Tier.HOST, Tier.NVME) == bracketed(beside)


@pytest.mark.parametrize(
    "row", rows("stage | gradients | parameters | A = 1 | A = 4"), ids=lambda row: row[0]
)
def test_what_a_rank_sends(row: list[str]) -> None:
    for micro_batches, cell in ((1, row[3]), (4, row[4])):
        sent = sum(plan_of(int(row[0]), "none", "none", micro_batches).sent_bytes().values())
        assert Fraction(sent, NUMEL) == Fraction(int(cell) * (RANKS - 1), RANKS)


def test_both_tables_are_there() -> None:
    assert [row[0] for row in rows("stage | offload | device | host or NVMe")] == list("01122333")
    assert [row[0] for row in rows("stage | gradients | parameters | A = 1 | A = 4")] == list("0123")
    assert re.search(r"in bf16 with AdamW and fp32 state, one micro-batch", PAGE)
