"""One large block in tiles and in little memory, beside the same with all the memory that it wants."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from aio.beside import file_for_fio
from frame.measured import Measured, TrainingRun
from frame.reference_model import Model
from frame.report import Table, Verdict, middle
from frame.side import Side, Spec
from frame.training import stalls

from tiering.tierbench.comparison import fio
from tiering.tierbench.comparison.fio import FioJob, RunReading
from tiering.tierbench.ratios import compare

MIB = 1 << 20
MB = 1e6
IN_TILES, IN_MEMORY = "tiles on NVMe", "tiles in memory"
CONSTANT = 256 * MIB
"""Beside the budgets: activations, temporary gradients of a tile, and what the C library keeps."""
MOST_OF_BOTH = 1.15
ITEMSIZE = 2


@dataclass(frozen=True, slots=True)
class Scale:
    """Budgets in bytes, of the side in little memory. A first round is dropped, then ``rounds`` are kept."""

    model: Model
    device: int
    host: int
    tile: int
    rounds: int
    fio_file: int
    fio_seconds: float

    @property
    def block(self) -> int:
        """Bytes of the block's matrices in bf16: of attention, and two of the MLP."""
        return 12 * self.model.width**2 * ITEMSIZE

    @property
    def matrix(self) -> int:
        """Bytes of the largest matrix in bf16."""
        return 4 * self.model.width**2 * ITEMSIZE


FULL = Scale(
    model=Model(width=8192, layers=1, sequence=32),
    device=96 * MIB,
    host=256 * MIB,
    tile=16 * MIB,
    rounds=3,
    fio_file=1 << 30,
    fio_seconds=3.0,
)

QUICK = replace(
    FULL,
    model=Model(width=256, layers=1, sequence=16),
    device=MIB,
    host=3 * MIB,
    tile=64 << 10,
    rounds=1,
    fio_file=32 * MIB,
    fio_seconds=0.2,
)


def specs(scale: Scale) -> list[Spec]:
    """The same tiles on both sides: so weights have to be equal to the bit."""
    zero = {"stage3_param_persistence_threshold": 0}
    little: dict[str, Any] = {
        "device_budget": scale.device,
        "host_budget": scale.host,
        "cache_in_host": False,
        "tile": scale.tile,
    }
    # Parameters, gradients and state.
    wanted = {"device_budget": 16 * scale.block // ITEMSIZE + 1024 * MIB, "tile": scale.tile}
    return [
        Spec(IN_TILES, "step.ours", scale.model, {"tiering": little, "zero": zero}, on_disk=True),
        Spec(IN_MEMORY, "step.ours", scale.model, {"tiering": wanted, "zero": zero}),
    ]


def case(run: TrainingRun[Scale]) -> None:
    scale = run.scale
    with file_for_fio(run, scale.fio_file) as job:
        measured = run.measured(specs(scale), scale.rounds, 1, partial(_fio, job, scale.fio_seconds))
    run.report.tables.append(table(scale, measured))
    judge(run, measured)


class Sides(TrainingRun[Scale]):
    """Takes the digests of the weights while the sides still run."""

    masters: Mapping[str, str] = {}

    def after_rounds(self, sides: Mapping[str, Side], readings: Mapping[str, Any]) -> None:
        self.masters = {name: sides[name].call("masters")[0] for name in sides if name in readings}


def _fio(
    job: FioJob | None, seconds: float, started: Mapping[str, Side]
) -> dict[str, Callable[[], RunReading]]:
    """fio beside the side on NVMe, which reads about as many bytes as it writes."""
    if job is None or IN_TILES not in started:
        return {}
    facts, mixed = started[IN_TILES].facts, replace(job, rw="rw")
    return {IN_TILES: partial(fio.run, mixed, facts["io_engine"], tuple(facts["io_flags"]), seconds)}


def table(scale: Scale, measured: Mapping[str, Measured]) -> Table:
    columns = (
        "side",
        "s per step",
        "forward",
        "backward",
        "update",
        "stalled",
        "peak RSS, MB",
        "budgets, MB",
    )
    table = Table(
        f"a block of {scale.block / MB:,.0f} MB with matrices of up to {scale.matrix / MB:,.0f} MB",
        (*columns, "read per step, MB", "written", "last loss"),
    )
    for name, side in measured.items():
        rounds = side.rounds
        parts = ("forward", "backward", "update")
        table.rows.append(
            (
                name,
                middle(side.times),
                *(f"{statistics.median(getattr(each, part) for each in rounds):.2f}" for part in parts),
                f"{statistics.median(each.stall_share for each in rounds):.1%}",
                f"{max(each.peak for each in rounds) / MB:,.0f}",
                f"{side.facts['owned'] / MB:,.0f}",
                *(
                    f"{statistics.median(each.counted[way] for each in rounds) / MB:,.1f}"
                    for way in ("read", "written")
                ),
                f"{rounds[-1].loss:.6f}",
            )
        )
        if causes := stalls(rounds):
            table.notes.append(f"{name} stalled for {causes}.")
    table.notes.append(
        f"Tiles of {scale.tile / MB:,.1f} MB. Peaks are those of rounds; the first values are drawn matrix by matrix."
    )
    return table


def judge(run: TrainingRun[Scale], measured: Mapping[str, Measured]) -> None:
    scale, tiles, resident = run.scale, measured.get(IN_TILES), measured.get(IN_MEMORY)
    if tiles is None:
        run.without("a block that is larger than the device", IN_TILES)
        return
    run.report.verdicts += [bytes_as_planned(tiles), within_budgets(scale, tiles)]
    if resident is None:
        run.without("the bits and the time of the same in memory", IN_MEMORY)
        return
    if isinstance(run, Sides):
        same = len(set(run.masters.values())) == 1
        found = "equal" if same else "DIFFERENT"
        run.report.verdicts.append(
            Verdict("weights after all rounds", found, "those in memory, to the bit", same)
        )
    if not tiles.fio:
        run.without("a step beside the machine's limits", "fio")
        return
    run.report.verdicts.append(beside_the_machine(tiles, resident))


def bytes_as_planned(tiles: Measured) -> Verdict:
    """Every round, to the byte, in both directions."""
    planned = f"{tiles.facts['planned_read']:,} and {tiles.facts['planned_written']:,}"
    found = "all rounds" if tiles.as_planned else "other bytes"
    return Verdict("bytes read and written per step", found, f"{planned}, as planned", tiles.as_planned)


def within_budgets(scale: Scale, tiles: Measured) -> Verdict:
    """The peak of all steps, beside the interpreter with torch."""
    net = max(each.peak for each in tiles.rounds) - tiles.facts["baseline"]
    most = scale.device + scale.host + CONSTANT
    goal = f"at most {most / MB:,.0f} MB: budgets {(scale.device + scale.host) / MB:,.0f}, and {CONSTANT / MB:,.0f}"
    return Verdict("peak RSS of steps, net of baseline", f"{net / MB:,.0f} MB", goal, net <= most)


def beside_the_machine(tiles: Measured, resident: Measured) -> Verdict:
    """A step beside the same in memory and fio's time for its bytes, one after the other."""
    disk = [round_.moved / reading.rate for round_, reading in zip(tiles.rounds, tiles.fio, strict=True)]
    bounds = [sum(each) for each in zip(resident.times, disk, strict=True)]
    ratio = compare(tiles.times, bounds).median
    found = (
        f"{ratio} (in memory {statistics.median(resident.times):.2f} s, disk {statistics.median(disk):.2f} s)"
    )
    return Verdict(
        "step / (step in memory + bytes at fio's rate)",
        found,
        f"at most {MOST_OF_BOTH}",
        ratio.point <= MOST_OF_BOTH,
    )
