"""The result of ``tierbench profile``, for people and programs. All sizes are bytes, all times seconds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from tiering.config.training import format_size
from tiering.planning.decoder import format_count
from tiering.planning.forecast import disk_seconds
from tiering.planning.rates import Rates
from tiering.tierbench.display import figures
from tiering.tierbench.replay.pattern import Pattern, Phase, Turn
from tiering.tierbench.replay.replayed_step import TurnResult
from tiering.tierbench.result import CommandResult, Engine, ResultPart
from tiering.tierbench.verdict import BALANCED_SHARE

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# The update is bound by the kernels if it waits for transfers for a smaller fraction of its time.
HIDDEN = 0.1
# With a larger fraction of its reads done before it, a phase would seem faster than the drive.
AHEAD = 0.1


@dataclass(frozen=True)
class Round:
    """Turns that were replayed between plain intervals. ``plain`` has the mean rates of these intervals."""

    turns: tuple[TurnResult, ...]
    plain: Rates


class PhaseResult(ResultPart):
    """A phase of a step. Bytes and seconds are those of the whole step of the model."""

    name: Phase
    read_bytes: int
    write_bytes: int
    replayed: float = Field(description="Bytes moved by the replay, divided by the bytes of one step.")
    seconds: float
    ahead: float = Field(
        default=0.0,
        description="Share of its reads that the previous phase did; the seconds of that phase include them.",
    )
    stalled: float | None = Field(
        default=None,
        description="Share of the time in which kernels waited for transfers; None without kernels.",
    )
    plain_seconds: float | None = Field(
        default=None,
        description="Seconds that plain intervals would take for the same bytes, at their mean rates.",
    )
    ratios: tuple[float, ...] = Field(
        default=(),
        description="For each round, the rate of the replay divided by the rate of the plain intervals before and"
        " after it; empty if much was read ahead.",
    )
    bound: Literal["reads", "writes", "both", "kernels"] | None = None

    @property
    def rate(self) -> float:
        """Bytes per second, the sum of both directions."""
        return (self.read_bytes + self.write_bytes) / self.seconds

    @property
    def of_plain(self) -> float | None:
        """The ratio of the replay's rate to that of plain intervals: the median of the rounds."""
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
    gpu_memory: int | None = Field(description="Bytes of GPU memory; None if the CPU is the device.")
    micro_batches: int
    kernels: bool = Field(description="Whether the optimizer's kernels ran.")
    slots: int
    slot_bytes: int
    space_bytes: int = Field(description="Bytes of the swap space, in which extents took turns.")
    phases: tuple[PhaseResult, ...]
    plain: dict[str, float] = Field(
        description="Bytes per second of plain intervals, by the name of the rate."
    )

    @property
    def seconds(self) -> float:
        """The seconds of a step's transfers, of the phases of the pattern."""
        return sum(phase.seconds for phase in self.phases)


def results(turns: Sequence[Turn], rounds: Iterable[Round], plain: Rates) -> Iterator[PhaseResult]:
    """The result of each phase for a whole step, from the turns of ``rounds``, without phases that moved nothing."""
    rounds = list(rounds)
    replayed_turns = [each for played in rounds for each in played.turns]
    for phase in dict.fromkeys(turn.phase for turn in turns):
        of_phase = [turn for turn in turns if turn.phase == phase and turn.read + turn.written]
        seconds = _step_seconds(of_phase, replayed_turns)
        if not of_phase or seconds is None:
            continue
        read_bytes = sum(turn.times * turn.read for turn in of_phase)
        write_bytes = sum(turn.times * turn.written for turn in of_phase)
        replayed = [each for each in replayed_turns if each.turn in of_phase]
        computed = sum(each.computed for each in replayed)
        stalled = sum(each.stalled for each in replayed) / sum(each.seconds for each in replayed)
        plain_seconds, ahead = _plain_seconds(read_bytes, write_bytes, plain), _ahead(replayed)
        comparable = plain_seconds is not None and ahead <= AHEAD
        yield PhaseResult(
            name=phase,
            read_bytes=read_bytes,
            write_bytes=write_bytes,
            replayed=sum(
                each.turns * each.turn.times * (each.turn.read + each.turn.written) for each in replayed
            )
            / (read_bytes + write_bytes),
            seconds=seconds,
            ahead=ahead,
            stalled=stalled if computed else None,
            plain_seconds=plain_seconds,
            ratios=tuple(_ratios(of_phase, read_bytes, write_bytes, rounds)) if comparable else (),
            bound=_bound(read_bytes, write_bytes, plain, stalled if computed else None)
            if comparable
            else None,
        )


def _ahead(replayed: Sequence[TurnResult]) -> float:
    """The fraction of the reads that were done before the phase, of complete turns."""
    expected = sum(each.turn.read for each in replayed if each.complete)
    read = sum(each.read for each in replayed if each.complete)
    return max(0.0, 1 - read / expected) if expected else 0.0


def _ratios(of_phase: Sequence[Turn], read: int, written: int, rounds: Sequence[Round]) -> Iterator[float]:
    for played in rounds:
        seconds = _step_seconds(of_phase, played.turns)
        plain_seconds = _plain_seconds(read, written, played.plain)
        if seconds and plain_seconds:
            yield plain_seconds / seconds


def _step_seconds(of_phase: Sequence[Turn], results: Sequence[TurnResult]) -> float | None:
    """Seconds of a phase of a whole step at the rate of its replayed part; None if no part of it was replayed."""
    whole = 0.0
    for turn in of_phase:
        times = [each for each in results if each.turn == turn]
        replayed = sum(each.turns for each in times)
        if not replayed:
            return None
        whole += turn.times * sum(each.seconds for each in times) / replayed
    return whole


def _plain_seconds(read: int, written: int, plain: Rates) -> float | None:
    """Seconds at the rates of plain intervals; None if a rate is missing; that of a mix is measured."""
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


def show(profile: Profile, console: Console) -> None:
    """Print ``profile``."""

    def put(text: str = "") -> None:
        console.print(figures.legible(text), markup=False, highlight=False)

    if profile.interrupted:
        put("Interrupted: the figures cover the part that was replayed.")
        put()
    device = "the CPU" if profile.gpu_memory is None else f"a GPU of {format_size(profile.gpu_memory)}"
    batches = f"{profile.micro_batches} micro-batches, " if profile.micro_batches > 1 else ""
    put(f"{profile.model[:1].upper()}{profile.model[1:]}.")
    put(f"Trained on {device}, {batches}{profile.state} state; pattern {profile.pattern}.")
    put(
        f"In {', '.join(each.directory for each in profile.targets)}: {profile.engine.ioengine},"
        f" bs {format_size(profile.bs)} ({profile.bs} bytes), iodepth {profile.iodepth}; {profile.slots} slots of"
        f" {format_size(profile.slot_bytes)}; extents take turns in {format_size(profile.space_bytes)}."
    )
    for each in profile.targets:
        for drive in each.backing.drives:
            put(f"{each.directory} is on {drive}.")
    put()
    console.print(_table(profile), markup=False, highlight=False)
    put()
    for line in _summary(profile):
        put(line)


def _table(profile: Profile) -> Table:
    from tiering._figures_table import FiguresTable

    table = FiguresTable.plain()
    kernels = ["stalled"] if profile.kernels else []
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
        text = heading in ("phase", "bound by")
        table.add_column(heading, justify="left" if text else "right", no_wrap=True)
    for each in profile.phases:
        stalled = ["-" if each.stalled is None else f"{each.stalled:.0%}"] if profile.kernels else []
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


def _summary(profile: Profile) -> Iterator[str]:
    step = next((each for each in profile.phases if each.name == "step"), None)
    if step is not None:
        plain_seconds = step.plain_seconds
        at_plain = (
            ""
            if plain_seconds is None
            else f" Plain reads and writes would take {figures.duration(plain_seconds)}."
        )
        bound = f", bound by {step.bound}" if step.bound else ""
        yield (
            f"Optimizer step of {format_count(profile.params)} parameters: {figures.duration(step.seconds)} (reads"
            f" {figures.nbytes(step.read_bytes)}, writes {figures.nbytes(step.write_bytes)}){bound}.{at_plain}"
        )
    if len(profile.phases) > 1:
        yield f"All phases: {figures.duration(profile.seconds)}, without the computation of forward and backward."
    if early := [f"{each.ahead:.0%} in {each.name}" for each in profile.phases if each.ahead > AHEAD]:
        yield f"Reads done ahead, in the phase before: {', '.join(early)}; the seconds cover the remaining reads."
    if any(each.replayed < 1 for each in profile.phases):
        yield "Phases that were replayed in part are extrapolated to the whole step."
    rates = ", ".join(
        f"{name.removeprefix('nvme_')} {figures.gb(rate)}" for name, rate in sorted(profile.plain.items())
    )
    if rates:
        yield f"Plain reads and writes: {rates} GB/s."
    spread = ", ".join(
        f"{each.name} {min(each.ratios):.2f} to {max(each.ratios):.2f}"
        for each in profile.phases
        if len(each.ratios) > 1
    )
    if spread:
        yield f"Ratio to plain reads and writes, over the rounds: {spread}."
    yield from (f"Note: {note}." for note in profile.notes)
    yield (
        f"Total: {figures.nbytes(profile.read_bytes)} read, {figures.nbytes(profile.written_bytes)} written."
    )
