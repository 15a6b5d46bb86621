"""Snapshots beside checkpoints, with part of the state in memory; and resumes that adopt the swap files, or copy."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frame.report import Table, Verdict, middle
from frame.side import SideError, Spec

from .scale import Scale
from .side import CheckpointRun

NAME = "ours, NVMe, with snapshots"
MOST_SECONDS = 0.4
MOST_BYTES = 1.02
"""Of the planned ones: the file system writes some of its own."""
MB = 1e6


@dataclass(slots=True)
class Snapshots:
    """The rounds of a run: what it took, as (seconds, bytes read, bytes written), and the ``plan``."""

    name: str
    facts: dict[str, Any]
    steps: list[dict[str, float]]
    snapshots: list[dict[str, float]]
    checkpoints: list[dict[str, float]]
    resumes: dict[str, list[dict[str, Any]]]


def spec(scale: Scale) -> Spec:
    """As much of the state in host memory as its budget has room for."""
    budgets = {"host_budget": scale.host, "device_budget": scale.device}
    return Spec(NAME, "checkpoint.resumed", scale.model, {"tiering": budgets}, on_disk=True)


def case(run: CheckpointRun) -> None:
    with run.started([spec(run.scale)]) as started:
        if not started:
            run.without("snapshots", NAME)
            return
        side = started[NAME]
        with tempfile.TemporaryDirectory(dir=side.place.directory, prefix="saved.") as directory:
            try:
                measured = rounds(side, Path(directory), run.scale.rounds)
            except SideError as error:
                run.fail(NAME, error)
                return
    run.sides.append(measured)
    run.report.tables += [saving(measured), resuming(measured)]
    run.report.verdicts += verdicts(measured)


def rounds(side: Any, directory: Path, count: int) -> Snapshots:
    """Rounds of a step, a snapshot and a checkpoint; then rounds of a resume of each kind. The first are dropped."""

    def call(method: str, **arguments: Any) -> Any:
        return side.call(method, **arguments)[0]

    facts = call("build", snapshots=True)
    result = Snapshots(side.name, facts, [], [], [], {"adopted": [], "copied": []})
    place = str(directory / "run")
    for _ in range(count + 1):
        result.steps.append(call("step"))
        result.snapshots.append(call("snapshot", directory=place))
        result.checkpoints.append(call("save", directory=place))
    state = call("fingerprint")
    call("end")
    for _ in range(count + 1):
        for way, found in result.resumes.items():
            resumed = call("resume", snapshots=way == "adopted", directory=place)
            call("end")
            if resumed.pop("fingerprint") != state:
                raise SideError(f"what was {way} is not what the run had")
            found.append(resumed)
    for found in (result.steps, result.snapshots, result.checkpoints, *result.resumes.values()):
        del found[0]
    return result


def saving(side: Snapshots) -> Table:
    """Seconds and bytes of saves and steps."""
    table = Table("snapshots", ("", "s", "read, MB", "written, MB", "planned: read, MB", "written, MB"))
    planned = {
        "snapshot": (0, side.facts["snapshot_bytes"]),
        "step": (side.facts["planned_read"], side.facts["planned_written"]),
    }
    taken = {"snapshot": side.snapshots, "checkpoint": side.checkpoints, "step": side.steps}
    for name, found in taken.items():
        moved = (middle([each[way] / MB for each in found], ".1f") for way in ("read", "written"))
        expected = (f"{each / MB:.1f}" for each in planned[name]) if name in planned else ("", "")
        table.rows.append((name, middle([each["seconds"] for each in found], ".3f"), *moved, *expected))
    table.notes.append(
        f"Medians with the range of {len(side.steps)} rounds, each a step, a snapshot and a checkpoint. Bytes as the"
        " kernel counts them, until nothing is in flight. A snapshot after each step adds what it writes; the step"
        " itself moves what it moves without snapshots."
    )
    return table


def resuming(side: Snapshots) -> Table:
    """Seconds until the first step of a resumed run has ended."""
    columns = (
        "resume",
        "initialize, s",
        "load, s",
        "first step, s",
        "all, s",
        "load: read, MB",
        "written, MB",
    )
    table = Table("resumes from a snapshot", columns)
    for way, found in side.resumes.items():
        parts = [
            [each["started"] for each in found],
            [each["loaded"]["seconds"] for each in found],
            [each["step"]["seconds"] for each in found],
            totals(found),
        ]
        moved = (middle([each["loaded"][kind] / MB for each in found], ".1f") for kind in ("read", "written"))
        table.rows.append((way, *(middle(part, ".2f") for part in parts), *moved))
    table.notes.append(
        "A run that copies is one without snapshots, which has half of the swap space. Both have the state of the run"
        " that made the snapshot. With initialize(resume=...) no first values are written to new swap files."
    )
    return table


def totals(found: Sequence[dict[str, Any]]) -> list[float]:
    """Seconds from the start of each to the end of its first step."""
    return [each["started"] + each["loaded"]["seconds"] + each["step"]["seconds"] for each in found]


def verdicts(side: Snapshots) -> list[Verdict]:
    """A snapshot takes little, and writes what was planned; who adopts starts sooner."""
    seconds = statistics.median(each["seconds"] for each in side.snapshots)
    written = statistics.median(each["written"] for each in side.snapshots)
    planned = max(side.facts["snapshot_bytes"], 1)
    adopted, copied = (statistics.median(totals(side.resumes[way])) for way in ("adopted", "copied"))
    return [
        Verdict(
            "seconds of a snapshot", f"{seconds:.3f}", f"at most {MOST_SECONDS}", seconds <= MOST_SECONDS
        ),
        Verdict(
            "bytes of a snapshot / planned",
            f"{written / planned:.3f}",
            f"at most {MOST_BYTES}",
            written <= MOST_BYTES * planned,
        ),
        Verdict(
            "start to first step: adopted / copied",
            f"{adopted / copied:.3f}",
            "less than 1",
            adopted < copied,
        ),
    ]
