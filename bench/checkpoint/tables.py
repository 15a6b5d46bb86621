"""Tables and verdicts: seconds beside dd's and the peers', and memory with and without the page cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from frame.report import Table, Verdict, middle

from tiering.tierbench.ratios import compare

from .dd import Moved
from .side import Reading, Trip

GB, MB = 1e9, 1e6
OF_DD = 0.8
MOST_OF_PEER = 1.0
MOST_MEMORY_OF_PEER = 0.1
WRITE, READ, COPY = "dd, write", "dd, read", "dd, copy"


@dataclass(slots=True)
class Measured:
    """A side after its rounds."""

    name: str
    facts: dict[str, Any]
    trips: list[Trip]

    @property
    def has_ceiling(self) -> bool:
        """Ours have one."""
        return self.trips[0].saved.spare is not None

    @property
    def saved(self) -> list[Reading]:
        return [trip.saved for trip in self.trips]

    @property
    def loaded(self) -> dict[str, list[Reading]]:
        """By way of loading."""
        return {way: [trip.loaded[way] for trip in self.trips] for way in self.trips[0].loaded}

    @property
    def best_loaded(self) -> list[Reading]:
        """In the way that is fastest."""
        return min(self.loaded.values(), key=lambda rounds: statistics.median(seconds(rounds)))


Disk = Mapping[str, Sequence[Moved]]


def seconds(rounds: Sequence[Reading]) -> list[float]:
    return [round_.seconds for round_ in rounds]


def rates(rounds: Sequence[Reading] | Sequence[Moved]) -> list[float]:
    """GB/s."""
    return [round_.rate / GB for round_ in rounds]


def times(title: str, sides: Mapping[str, Measured], disk: Disk) -> Table:
    """Seconds and rates of every side, and of dd."""
    saving = ("save, s", "GB/s", "of dd's copy", "of dd's write")
    table = Table(title, ("side", *saving, "load, s", "GB/s", "of dd's copy", "of dd's read"))

    def cells(rounds: Sequence[Reading], bound: str) -> tuple[str, ...]:
        of_dd = [str(compare(rates(rounds), rates(disk[name])).median) for name in (COPY, bound)]
        return middle(seconds(rounds), ".2f"), middle(rates(rounds), ".2f"), *of_dd

    for side in sides.values():
        for way, rounds in side.loaded.items():
            saved = ("",) * 4 if way else cells(side.saved, WRITE)
            name = f"{side.name}, {way}" if way else side.name
            table.rows.append((name, *saved, *cells(rounds, READ)))
    for name, moved in disk.items():
        row = (middle([transfer.seconds for transfer in moved], ".2f"), middle(rates(moved), ".2f"), "", "")
        none = ("",) * 4
        table.rows.append((name, *(none if name == READ else row), *(none if name == WRITE else row)))
    nbytes = ", ".join(f"{side.name}: {side.saved[0].nbytes / GB:.3f}" for side in sides.values())
    some = next(iter(sides.values())).trips
    table.notes.append(
        f"Medians with the range of {len(some)} rounds, ratios of the same round with 95 % intervals. GB of a"
        f" checkpoint: {nbytes}; {', '.join(disk)}: {next(iter(disk.values()))[0].nbytes / GB:.3f}."
    )
    table.notes.append(
        "Saving from NVMe reads the state from the disk that it writes to, and loading writes it there: dd's copy does"
        " as much. Beside dd's plain write or read, half of that work is not counted."
    )
    return table


def memory(title: str, sides: Mapping[str, Measured]) -> Table:
    """What is taken beside the state, and the kernel's count of bytes over the disk."""
    columns = ("side", "RSS before, GB", "rise, MB: saving", "loading", "with page cache: saving", "loading")
    table = Table(title, (*columns, "below the ceiling, MB", "disk, read + written, GB: saving", "loading"))

    def disk(rounds: Sequence[Reading]) -> str:
        return " + ".join(
            f"{statistics.median(round_.disk[way] for round_ in rounds) / GB:.3f}" for way in (0, 1)
        )

    for side in sides.values():
        for way, loaded in side.loaded.items():
            both = [*side.saved, *loaded]
            spare = [reading.spare for reading in both if reading.spare is not None]
            saved = (
                ("",) * 3
                if way
                else (most(side.saved, "rise"), most(side.saved, "charged"), disk(side.saved))
            )
            table.rows.append(
                (
                    f"{side.name}, {way}" if way else side.name,
                    f"{max(reading.before for reading in both) / GB:.3f}",
                    *(saved[0], most(loaded, "rise")),
                    *(saved[1], most(loaded, "charged")),
                    f"{min(spare) / MB:.0f}" if spare else "",
                    *(saved[2], disk(loaded)),
                )
            )
    table.notes.append(
        "Rise: VmHWM above the RSS before, of the rank that has most. With page cache: anonymous memory of the side and"
        " the page cache of the machine together, sampled, which is what a container is charged for."
    )
    table.notes.append(
        "The ceiling of ours: what the plan took of the budgets, activations and the constant of docs/guide/memory.md,"
        " on top of an interpreter with torch."
    )
    return table


def most(rounds: Sequence[Reading], name: str) -> str:
    """Of all rounds, in MB."""
    return f"{max(getattr(round_, name) for round_ in rounds) / MB:.0f}"


def at_rate(label: str, ours: Sequence[Reading], name: str, theirs: Sequence[Moved]) -> Verdict:
    """Bytes of the checkpoint per second, beside dd's."""
    ratio = compare(rates(ours), rates(theirs)).median
    return Verdict(f"GB/s: {label} / {name}", str(ratio), f"at least {OF_DD}", ratio.point >= OF_DD)


def beside(ours: Measured, theirs: Measured) -> Iterator[Verdict]:
    """Saving and loading, each in less time and with a fraction of the memory."""
    pairs: dict[str, Callable[[Measured], Sequence[Reading]]] = {
        "saving": lambda side: side.saved,
        "loading": lambda side: side.best_loaded,
    }
    for label, rounds in pairs.items():
        pair = rounds(ours), rounds(theirs)
        ratio = compare(*map(seconds, pair)).median
        yield Verdict(
            f"time of {label}: {ours.name} / {theirs.name}",
            str(ratio),
            f"less than {MOST_OF_PEER:g}",
            ratio.point < MOST_OF_PEER,
        )
        extra, other = (statistics.median(round_.charged for round_ in side) for side in pair)
        share = extra / max(other, 1)
        yield Verdict(
            f"memory of {label}, page cache included: {ours.name} / {theirs.name}",
            f"{share:.3f} ({extra / MB:.0f} of {other / MB:.0f} MB)",
            f"at most {MOST_MEMORY_OF_PEER}",
            share <= MOST_MEMORY_OF_PEER,
        )


def below_ceiling(side: Measured) -> Verdict:
    """In every round, on every rank."""
    rounds = [*side.saved, *(round_ for rounds in side.loaded.values() for round_ in rounds)]
    spare = min(round_.spare for round_ in rounds if round_.spare is not None)
    return within("saving and loading", side.name, spare)


def within(label: str, name: str, spare: int) -> Verdict:
    """``spare`` bytes below the ceiling."""
    margin = f"{abs(spare) / MB:.0f} MB {'below' if spare >= 0 else 'above'} the ceiling"
    return Verdict(f"peak RSS of {label}: {name}", margin, "at most the ceiling", spare >= 0)
