"""What bench_activations.py counts of a model's shapes, what it concludes, and that it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from activations import bits, rows, saved, sides, tiers
from activations.bits import Trained
from activations.rows import Moved
from activations.scale import FULL, MIB, QUICK, Scale
from frame.measured import Measured, TrainingRun
from frame.reference_model import Model
from frame.report import Report, Verdict
from frame.side import Place, Side
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tiering.host.cpu_dtypes import is_slow
from tiering.tierbench.comparison.fio import RunReading

from .known import a_round

BY_THE_CLOCK = ("fio's rate",)
SCALE = dataclasses.replace(QUICK, model=Model(width=512, layers=12, sequence=512, batch=4))
SWAPPED = 366 * MIB
"""Of 12 blocks with 32 MiB each, and 6 MiB of the end; the budget is 48 MiB, of which 24 MiB stay."""


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "not reentrant"])
def test_the_shapes_say_what_autograd_saves(
    monkeypatch: pytest.MonkeyPatch, checkpointing: str | None
) -> None:
    """Each storage once, in the order in which autograd saves it, without small ones and parameters."""
    model = Model(width=128, layers=2, sequence=16, batch=4, checkpointing=checkpointing)
    row = 4 * 16 * 128 * 2
    monkeypatch.setattr(saved, "SMALLEST", row)
    module = model.build().bfloat16()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() >= row and storage.data_ptr() not in parameters:
            kept.setdefault(storage.data_ptr(), tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module(*next(model.batches()))
    assert [tensor.untyped_storage().nbytes() for tensor in kept.values()] == saved.storages(model)
    assert len(kept) == (2 * 8 + 3 if checkpointing is None else 2 + 3)
    torch.autograd.backward(loss)


def test_what_is_swapped_is_what_was_saved_first() -> None:
    assert saved.swapped([4, 4, 4, 4, 4], 16) == 12
    assert saved.swapped([4, 4, 4, 4, 4], 15) == 16
    assert saved.swapped([4, 4], 16) == 0
    # Larger than half of the budget: it never waits in memory.
    assert saved.swapped([4, 9, 4], 16) == 9
    assert saved.swapped(saved.storages(SCALE.model), SCALE.budget) == SWAPPED
    assert FULL.budget == 48 * MIB


def swapping(seconds: float = 1.0, written: int = SWAPPED, read: int = SWAPPED, peak: int = 0) -> Measured:
    """Two rounds of a side with budgets of 100 MiB and a baseline of 10 MiB, beside which fio moves 366 MiB/s.

    Its state moves some bytes, too, as planned.
    """
    counted = {"read": read + 7.0, "written": written + 5.0, "stalled": 0.0}
    facts = {"planned_read": 7, "planned_written": 5, "owned": 100 * MIB, "baseline": 10 * MIB}
    rounds = [a_round(seconds, steps=1, counted=counted)] * 2
    disk = [RunReading(SWAPPED // 2, SWAPPED // 2, 1.0, 0.1)] * 2
    return Measured(sides.ON_NVME, facts, rounds, (0, peak), disk)


def resident(seconds: float) -> Measured:
    facts = {"planned_read": 0, "planned_written": 0, "owned": 100 * MIB, "baseline": 10 * MIB}
    return Measured(sides.ON_DEVICE, facts, [a_round(seconds, steps=1, counted={"stalled": 0.0})] * 2, (0, 1))


@pytest.fixture
def run(place: Place) -> TrainingRun[Scale]:
    return TrainingRun[Scale](Report("known", {}), place, SCALE, Side)


def judged(run: TrainingRun[Scale], *measured: Measured) -> dict[str, Verdict]:
    tiers.judge(run, {side.name: side for side in measured})
    return {verdict.what: verdict for verdict in run.report.verdicts}


def test_a_step_takes_as_long_as_compute_or_the_disk(run: TrainingRun[Scale]) -> None:
    what = "step / max(compute, bytes at fio's rate)"
    # The disk needs 2 s for both directions.
    for seconds, compute, holds in ((2.2, 1.0, True), (2.3, 1.0, False), (3.3, 3.0, True), (3.4, 3.0, False)):
        run.report.verdicts.clear()
        assert judged(run, swapping(seconds), resident(compute))[what].holds is holds, (seconds, compute)


def test_bytes_are_those_of_the_shapes_to_the_byte(run: TrainingRun[Scale]) -> None:
    for written, read, holds in (
        (SWAPPED, SWAPPED, True),
        (SWAPPED + 1, SWAPPED, False),
        (SWAPPED, 0, False),
    ):
        run.report.verdicts.clear()
        goal = judged(run, swapping(written=written, read=read))["bytes of activations per step"]
        assert goal.holds is holds and goal.goal.startswith(f"{SWAPPED:,} each")


def test_the_peak_is_within_budgets_and_a_constant(run: TrainingRun[Scale]) -> None:
    # The largest activation has 8 MiB.
    most = (10 + 100 + 96 + 32 + 4 * 8) * MIB
    for peak, holds in ((most, True), (most + 1, False)):
        run.report.verdicts.clear()
        assert judged(run, swapping(peak=peak))["peak RSS net of baseline"].holds is holds


def test_what_is_missing_is_told(run: TrainingRun[Scale]) -> None:
    goals = judged(run, dataclasses.replace(swapping(), fio=[]), resident(1.0))
    assert "bytes of activations per step" in goals and len(goals) == 2
    assert run.report.skipped == ["a step beside compute and fio: not measured without fio"]
    judged(run, resident(1.0))
    assert run.report.skipped[1:] == ["activations on NVMe: not measured without ours, NVMe"]


def trained(masters: str = "bits", moved: int = 40, **changes: Any) -> Trained:
    known = Trained(None, "device", "nvme", masters, 5.5, (0, 0), (moved, 40), 40)
    return dataclasses.replace(known, **changes)


def test_bits_are_those_of_the_first_run_with_the_same_checkpointing() -> None:
    report = Report("known", {})
    first = trained(activations="device", moved=0)
    first = dataclasses.replace(first, moved=(0, 0), expected=0)
    other = [
        dataclasses.replace(each, checkpointing="reentrant", masters="others") for each in (first, trained())
    ]
    bits.show(
        report, SCALE, [first, trained(), trained("wrong"), trained(moved=41), trained(loss=5.0), *other]
    )
    assert [row[3] for row in report.tables[0].rows] == [
        *("reference", "equal", "DIFFERENT", "equal", "DIFFERENT"),
        *("reference", "equal"),
    ]
    assert [(goal.found, goal.holds) for goal in report.verdicts] == [
        ("3 of 5 runs equal", False),
        ("4 of 5 runs exact", False),
        ("2 of 2 runs equal", True),
        ("2 of 2 runs exact", True),
    ]


def test_bytes_do_not_depend_on_the_number_of_chunks() -> None:
    def concluded(*moved: tuple[float, float]) -> Verdict:
        report = Report("known", {})
        runs = [Moved("chunks", 2**number, (7, 5), each) for number, each in enumerate(moved)]
        rows.show(report, SCALE, [*runs, Moved("micro-batches", 2, (14, 5), (14.0, 5.0))])
        return report.verdicts[0]

    assert concluded((6.0, 5.0), (7.0, 5.0), (7.0, 5.0)).holds
    more = concluded((7.0, 5.0), (7.0, 5.0), (8.0, 5.0))
    assert not more.holds and more.found == "7 read, 5 written or 8 read, 5 written"
    assert not concluded((7.0, 5.0), (8.0, 5.0), (8.0, 5.0)).holds


@pytest.mark.slow
@pytest.mark.skipif(is_slow(torch.bfloat16), reason="this CPU is slow in bf16: a small run takes ten minutes")
def test_a_small_run_gives_every_goal(command: Callable[..., tuple[int, str, Any, str]]) -> None:
    """Bits, bytes and memory are exact at any size; times are those of a busy machine."""
    _, text, raw, output = command("bench_activations.py", "--quick", "--threads", "1")
    goals = {goal["what"]: goal["holds"] for goal in raw["goals"]}
    exact = {what: holds for what, holds in goals.items() if not any(word in what for word in BY_THE_CLOCK)}
    assert set(exact.values()) == {True} and len(exact) == 2 * 3 + 1 + 2, goals
    for name in (sides.ON_DEVICE, sides.IN_HOST, sides.ON_NVME, sides.PLAIN, sides.SAVE_ON_CPU):
        assert f"| {name} |" in text
    assert output.count("case ") == 3
