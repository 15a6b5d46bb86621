"""What a run of ``tierbench profile`` has found, for people and programs. Bytes and seconds throughout."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from tiering.config.training import format_size
from tiering.planning.forecast import disk_seconds
from tiering.planning.rates import Rates
from tiering.planning.sizing import format_count
from tiering.tierbench.display import figures
from tiering.tierbench.replay.pattern import Pattern, Phase, Turn
from tiering.tierbench.replay.step import Taken
from tiering.tierbench.result import CommandResult, Engine, ResultPart
from tiering.tierbench.verdict import BALANCED_SHARE

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

HIDDEN = 0.1  # of the update spent waiting for transfers: the kernels bound it then
AHEAD = 0.1  # of a phase's reads done before it: by its seconds it would be faster than the drive


@dataclass(frozen=True)
class Round:
    """Turns that were replayed between plain windows, whose rates are the means of those before and after."""

    taken: tuple[Taken, ...]
    plain: Rates


class PhaseResult(ResultPart):
    """A part of a step. Bytes and seconds are those of the model's whole step."""

    name: Phase
    read_bytes: int
    write_bytes: int
    replayed: float = Field(description="Bytes that were moved, by those of one step's.")
    seconds: float
    ahead: float = Field(
        default=0.0,
        description="Share of its reads that were done in the phase before, and in the seconds of that.",
    )
    stalled: float | None = Field(default=None, description="Share of waiting for transfers beside kernels.")
    plain_seconds: float | None = Field(
        default=None, description="Of the same bytes at the mean rates of plain windows."
    )
    ratios: tuple[float, ...] = Field(
        default=(),
        description="Of each round: the replay's rate by that of the plain windows around it. None if much was ahead.",
    )
    bound: Literal["reads", "writes", "both", "kernels"] | None = None

    @property
    def rate(self) -> float:
        """Bytes per second, of both directions together."""
        return (self.read_bytes + self.write_bytes) / self.seconds

    @property
    def of_plain(self) -> float | None:
        """The replay's rate by that of plain windows: the median of the rounds."""
        return statistics.median(self.ratios) if self.ratios else None


class Profile(CommandResult):
    """A run of ``tierbench profile DIR ...``."""

    kind: Literal["profile"] = "profile"
    engine: Engine
    bs: int
    iodepth: int
    pattern: Pattern
    model: str
    params: int
    state: str
    gpu_memory: int | None = Field(description="None: the CPU is the device.")
    micro_batches: int
    kernels: bool = Field(description="Whether the optimizer's kernels ran.")
    slots: int
    slot_bytes: int
    space_bytes: int = Field(description="Of swap space, in which extents took turns.")
    phases: tuple[PhaseResult, ...]
    plain: dict[str, float] = Field(description="Bytes per second of plain windows, by name of Rates.")

    @property
    def seconds(self) -> float:
        """Of a step's transfers, as far as the pattern goes."""
        return sum(phase.seconds for phase in self.phases)


def results(turns: Sequence[Turn], rounds: Iterable[Round], plain: Rates) -> Iterator[PhaseResult]:
    """What the turns of ``rounds`` come to for a whole step, by phase. What did not move is left out."""
    rounds = list(rounds)
    taken = [each for played in rounds for each in played.taken]
    for phase in dict.fromkeys(turn.phase for turn in turns):
        of_phase = [turn for turn in turns if turn.phase == phase and turn.read + turn.written]
        seconds = _whole(of_phase, taken)
        if not of_phase or seconds is None:
            continue
        read = sum(turn.times * turn.read for turn in of_phase)
        written = sum(turn.times * turn.written for turn in of_phase)
        replayed = [each for each in taken if each.turn in of_phase]
        computed = sum(each.computed for each in replayed)
        stalled = sum(each.stalled for each in replayed) / sum(each.seconds for each in replayed)
        plainly, ahead = _plain_seconds(read, written, plain), _ahead(replayed)
        alone = plainly is not None and ahead <= AHEAD
        yield PhaseResult(
            name=phase,
            read_bytes=read,
            write_bytes=written,
            replayed=sum(
                each.turns * each.turn.times * (each.turn.read + each.turn.written) for each in replayed
            )
            / (read + written),
            seconds=seconds,
            ahead=ahead,
            stalled=stalled if computed else None,
            plain_seconds=plainly,
            ratios=tuple(_ratios(of_phase, read, written, rounds)) if alone else (),
            bound=_bound(read, written, plain, stalled if computed else None) if alone else None,
        )


def _ahead(replayed: Sequence[Taken]) -> float:
    """The share of what was to be read that was there already; a turn that was cut is counted by what it read."""
    expected = sum(each.turn.read for each in replayed if each.complete)
    read = sum(each.read for each in replayed if each.complete)
    return max(0.0, 1 - read / expected) if expected else 0.0


def _ratios(of_phase: Sequence[Turn], read: int, written: int, rounds: Sequence[Round]) -> Iterator[float]:
    for played in rounds:
        seconds = _whole(of_phase, played.taken)
        plainly = _plain_seconds(read, written, played.plain)
        if seconds and plainly:
            yield plainly / seconds


def _whole(of_phase: Sequence[Turn], taken: Sequence[Taken]) -> float | None:
    """Seconds of a phase of a whole step at the rate of what was replayed of it; None if that is nothing."""
    whole = 0.0
    for turn in of_phase:
        times = [each for each in taken if each.turn == turn]
        replayed = sum(each.turns for each in times)
        if not replayed:
            return None
        whole += turn.times * sum(each.seconds for each in times) / replayed
    return whole


def _plain_seconds(read: int, written: int, plain: Rates) -> float | None:
    """At the rates of plain windows; None if one is missing: those of reads and of writes do not tell the mix."""
    needed = (
        (read, plain.nvme_read),
        (written, plain.nvme_write),
        (min(read, written), plain.nvme_mixed),
    )
    missing = any(nbytes and rate is None for nbytes, rate in needed)
    return None if missing else disk_seconds(read, written, plain)


def _bound(
    read: int, written: int, plain: Rates, stalled: float | None
) -> Literal["reads", "writes", "both", "kernels"]:
    if stalled is not None and stalled < HIDDEN:
        return "kernels"
    reading, writing = read / (plain.nvme_read or 1.0), written / (plain.nvme_write or 1.0)
    if abs(reading - writing) <= BALANCED_SHARE * max(reading, writing):
        return "both"
    return "reads" if reading > writing else "writes"


def show(found: Profile, console: Console) -> None:
    """Print it."""

    def put(text: str = "") -> None:
        console.print(figures.legible(text), markup=False, highlight=False)

    if found.interrupted:
        put("Interrupted: this is what was replayed until then.")
        put()
    device = "the CPU" if found.gpu_memory is None else f"a GPU of {format_size(found.gpu_memory)}"
    batches = f"{found.micro_batches} micro-batches, " if found.micro_batches > 1 else ""
    put(f"{found.model[:1].upper()}{found.model[1:]}.")
    put(f"Trained on {device}, {batches}{found.state} state; pattern {found.pattern}.")
    put(
        f"In {', '.join(each.directory for each in found.targets)}: {found.engine.ioengine}, bs {format_size(found.bs)}"
        f" ({found.bs} bytes), iodepth {found.iodepth}; {found.slots} slots of {format_size(found.slot_bytes)}; extents"
        f" take turns in {format_size(found.space_bytes)}."
    )
    for each in found.targets:
        for drive in each.backing.drives:
            put(f"{each.directory} is on {drive}.")
    put()
    console.print(_table(found), markup=False, highlight=False)
    put()
    for line in _meaning(found):
        put(line)


def _table(found: Profile) -> Table:
    from tiering.figures_table import FiguresTable

    table = FiguresTable.plain()
    kernels = ["stalled"] if found.kernels else []
    for heading in (
        "phase",
        "reads",
        "writes",
        "GB/s",
        "seconds",
        "of plain",
        *kernels,
        "bound by",
        "replayed",
    ):
        left = heading in ("phase", "bound by")
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for each in found.phases:
        stalled = ["-" if each.stalled is None else f"{each.stalled:.0%}"] if found.kernels else []
        table.add_row(
            each.name,
            figures.nbytes(each.read_bytes) if each.read_bytes else "-",
            figures.nbytes(each.write_bytes) if each.write_bytes else "-",
            figures.gb(each.rate) if each.ahead <= AHEAD else "-",
            figures.number(each.seconds),
            "-" if each.of_plain is None else f"{each.of_plain:.2f}",
            *stalled,
            each.bound or "-",
            f"{each.replayed:.1%}" if each.replayed < 1 else f"{each.replayed:.0f} x",
        )
    return table


def _meaning(found: Profile) -> Iterator[str]:
    step = next((each for each in found.phases if each.name == "step"), None)
    if step is not None:
        plainly = step.plain_seconds
        at_plain = (
            "" if plainly is None else f" Plain windows would take {figures.duration(plainly)} for that."
        )
        bound = f", bound by {step.bound}" if step.bound else ""
        yield (
            f"Optimizer step of {format_count(found.params)} parameters: {figures.duration(step.seconds)} (reads"
            f" {figures.nbytes(step.read_bytes)}, writes {figures.nbytes(step.write_bytes)}){bound}.{at_plain}"
        )
    if len(found.phases) > 1:
        yield f"All phases: {figures.duration(found.seconds)}, less what forward and backward compute meanwhile."
    if early := [f"{each.ahead:.0%} in {each.name}" for each in found.phases if each.ahead > AHEAD]:
        yield f"Of the reads these were done ahead, in the phase before: {', '.join(early)}; seconds are for the rest."
    if any(each.replayed < 1 for each in found.phases):
        yield "What was not replayed whole is told as the whole would take at its rate."
    rates = ", ".join(
        f"{name.removeprefix('nvme_')} {figures.gb(rate)}" for name, rate in sorted(found.plain.items())
    )
    if rates:
        yield f"Plain windows: {rates} GB/s."
    spread = ", ".join(
        f"{each.name} {min(each.ratios):.2f} to {max(each.ratios):.2f}"
        for each in found.phases
        if len(each.ratios) > 1
    )
    if spread:
        yield f"Of plain windows, from round to round: {spread}."
    yield from (f"Note: {note}." for note in found.notes)
    yield (
        f"In all {figures.nbytes(found.read_bytes)} were read and {figures.nbytes(found.written_bytes)} written."
    )
