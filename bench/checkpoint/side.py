"""A side as the benchmark sees it: as many processes as it has ranks, which save, load and train when told to."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frame import side
from frame.rounds import Run
from frame.side import SideError, Spec

from .files import make_cold, removed_from
from .scale import Scale
from .watch import charged

FROM_DISK = 0.9
"""Of a checkpoint's bytes that a load must have read from the disk: what was in the page cache proves nothing."""


@dataclass(frozen=True, slots=True)
class SavingSpec(Spec):
    """``loads``: the ways in which what was saved is loaded, one after the other, by name."""

    loads: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}})


@dataclass(frozen=True, slots=True)
class Reading:
    """One save or load of a checkpoint of ``nbytes``, of all ranks together: the slowest rank's seconds.

    Memory in bytes: ``before`` is RSS, ``rise`` from there to the peak, each of the rank that has most; ``spare`` is
    what the peak leaves below the ceiling, None for who has none; ``charged`` the rise of all ranks together, with the
    page cache. ``disk``: (read, written), as the kernel counts. ``figures``: of a save while training, of rank 0.
    """

    seconds: float
    nbytes: int
    before: int
    rise: int
    spare: int | None
    charged: int
    disk: tuple[int, int]
    figures: dict[str, float]

    @property
    def rate(self) -> float:
        """Bytes of the checkpoint per second."""
        return self.nbytes / self.seconds


@dataclass(frozen=True, slots=True)
class Trip:
    """Saved, and loaded in each of its ways."""

    saved: Reading
    loaded: dict[str, Reading]


class Side(side.Side):
    """Ranks that hold a state. Raises SideError."""

    spec: SavingSpec

    def trip(self) -> Trip:
        """Save, forget what the page cache has of it, change the state, load. The checkpoint is removed."""
        with tempfile.TemporaryDirectory(dir=self.place.directory, prefix="saved.") as directory:
            path = Path(directory) / "checkpoint"
            saved = self._read(path, "save", directory=str(path))
            loaded = {}
            for name, options in self.spec.loads.items():
                self.call("change")
                make_cold(path)
                loaded[name] = reading = self._read(path, "load", directory=str(path), options=dict(options))
                if reading.disk[0] < FROM_DISK * reading.nbytes:
                    raise SideError(
                        f"{self.name} loaded {reading.nbytes:,} bytes, of which {reading.disk[0]:,} came from a disk:"
                        f" {path} is not on one, or the page cache kept them"
                    )
        removed_from(self.place.directory)
        return Trip(saved, loaded)

    def train(self, steps: int, save: str = "") -> Reading:
        """``steps`` steps behind a save in the "foreground", during one in the "background", or without."""
        with tempfile.TemporaryDirectory(dir=self.place.directory, prefix="saved.") as directory:
            path = Path(directory) / "checkpoint"
            reading = self._read(path, "train", steps=steps, save=save, directory=str(path))
        removed_from(self.place.directory)
        return reading

    def _read(self, path: Path, method: str, **arguments: Any) -> Reading:
        with charged(self.pids) as charge:
            ranks = self.call(method, **arguments)
        spare = [rank["ceiling"] - rank["peak"] for rank in ranks if rank["ceiling"] is not None]
        return Reading(
            seconds=max(rank["seconds"] for rank in ranks),
            nbytes=sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
            before=max(rank["before"] for rank in ranks),
            rise=max(rank["peak"] - rank["before"] for rank in ranks),
            spare=min(spare) if spare else None,
            charged=charge.rise,
            disk=(sum(rank["disk"][0] for rank in ranks), sum(rank["disk"][1] for rank in ranks)),
            figures=ranks[0]["figures"],
        )


CheckpointRun = Run[Scale, Side]
