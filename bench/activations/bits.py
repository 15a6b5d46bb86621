"""The bits of all weights: activations on each tier, with and without checkpointing, at each placement of state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from frame.measured import TrainingRun
from frame.report import Report, Table, Verdict
from frame.side import Side

from . import saved, sides
from .scale import MIB, Scale

CHECKPOINTING = (None, "reentrant", "not reentrant")
STATE: dict[str, tuple[int, int, dict[str, Any]]] = {
    "device": (256 * MIB, 64 * MIB, {}),
    "host": (2 * MIB, 64 * MIB, {}),
    "NVMe": (2 * MIB, 16 * MIB, {"cache_in_host": False}),
    "optimizer state on NVMe": (256 * MIB, 16 * MIB, {"cache_in_host": False}),
}
"""By name: device budget, host budget beside activations, and further keys."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What a run showed after all steps. ``moved`` are bytes of activations (read, written) in the last ones."""

    checkpointing: str | None
    state: str
    activations: str
    masters: str
    loss: float
    planned: tuple[int, int]
    moved: tuple[int, int]
    expected: int


def case(run: TrainingRun[Scale]) -> None:
    trained = []
    for checkpointing in CHECKPOINTING:
        model = replace(run.scale.small, checkpointing=checkpointing)
        runs = list(_runs(run.scale, checkpointing))
        spec = sides.ours(f"bits, checkpointing: {checkpointing or 'none'}", model, runs[0][2])
        with run.started([spec]) as started:
            for side in started.values():
                trained += [_train(run.scale, side, *each) for each in runs]
    run.sides += trained
    show(run.report, run.scale, trained)


def _runs(scale: Scale, checkpointing: str | None) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Where the state and the activations are, and the section ``tiering``. First, both are on the device."""
    for state, (device, host, keys) in STATE.items():
        places = ["device"] if state == "device" else []
        places += ["host", "nvme"] if checkpointing is None else ["nvme"]
        for place in places:
            moved = sides.moved_to(place, scale.small_budget, host)
            yield state, place, {"device_budget": device, **moved, **keys}


def _train(scale: Scale, side: Side, state: str, place: str, tiering: dict[str, Any]) -> Trained:
    zero: dict[str, Any] = {"stage3_param_persistence_threshold": 0}
    if state.startswith("optimizer"):
        zero["offload_param"] = {"device": "none"}
    side.rebuild({"tiering": tiering, "zero": zero, "exact": True})
    # The first step finds in memory what filling the tiers left there.
    side.train(1)
    steady = scale.steps - 1
    round_ = side.train(steady)
    planned = side.facts["planned_read"], side.facts["planned_written"]
    counted = round_.counted["read"], round_.counted["written"]
    model = side.spec.model
    assert model is not None
    expected = saved.swapped(saved.storages(model), scale.small_budget) if place == "nvme" else 0
    return Trained(
        model.checkpointing,
        state,
        place,
        side.call("masters")[0],
        round_.loss,
        planned,
        (int(counted[0] - steady * planned[0]), int(counted[1] - steady * planned[1])),
        steady * expected,
    )


def show(report: Report, scale: Scale, trained: list[Trained]) -> None:
    """A row for each run, and the goals for each way of checkpointing."""
    columns = ("checkpointing", "state", "activations", "losses and weights", "read per step, MB", "written")
    table = Table(f"bits after {scale.steps} steps of a {scale.small}", columns)
    reference: dict[str | None, Trained] = {}
    for each in trained:
        reference.setdefault(each.checkpointing, each)
    for each in trained:
        first = reference[each.checkpointing]
        bits = "reference" if each is first else "equal" if _same(each, first) else "DIFFERENT"
        moved = (f"{nbytes / (scale.steps - 1) / 1e6:.1f}" for nbytes in each.moved)
        table.rows.append((each.checkpointing or "none", each.state, each.activations, bits, *moved))
    table.notes.append("Bytes of activations: those counted in C, less those of the state by the plan.")
    report.tables.append(table)
    for checkpointing, first in reference.items():
        those = [each for each in trained if each.checkpointing == checkpointing]
        same = sum(_same(each, first) for each in those)
        exact = sum(each.moved == (each.expected, each.expected) for each in those)
        subject = f"checkpointing: {checkpointing or 'none'}"
        report.verdicts += [
            Verdict(
                f"{subject}: losses and weights",
                f"{same} of {len(those)} runs equal",
                "the bits with activations on the device",
                same == len(those),
            ),
            Verdict(
                f"{subject}: bytes of activations",
                f"{exact} of {len(those)} runs exact",
                "read and written as the model's shapes say",
                exact == len(those),
            ),
        ]


def _same(first: Trained, other: Trained) -> bool:
    return (first.masters, first.loss) == (other.masters, other.loss)
