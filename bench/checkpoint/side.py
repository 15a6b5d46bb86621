"""A side as the benchmark sees it: as many processes as it has ranks, which save, load and train when told to."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ranks import side as ranks
from step.side import SideError, free_port

from .files import make_cold, removed_from
from .watch import charged

_BENCH = Path(__file__).resolve().parents[1]

FROM_DISK = 0.9
"""Of a checkpoint's bytes that a load must have read from the disk: what was in the page cache proves nothing."""


@dataclass(frozen=True, slots=True)
class Spec(ranks.Spec):
    """``loads``: the ways in which what was saved is loaded, one after the other, by name."""

    loads: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}})


@dataclass(frozen=True, slots=True)
class Reading:
    """One save or load of a checkpoint of ``nbytes``, of all ranks together: the slowest rank's seconds.

    Memory in bytes: ``before`` is RSS, ``rise`` from there to the peak, each of the rank that has most; ``spare`` is
    what the peak leaves below the ceiling, None for who has none; ``charged`` the rise of all ranks together, with the
    page cache. ``disk``: (read, written), as the kernel counts. ``told``: what rank 0 says.
    """

    seconds: float
    nbytes: int
    before: int
    rise: int
    spare: int | None
    charged: int
    disk: tuple[int, int]
    told: dict[str, float]

    @property
    def rate(self) -> float:
        """Bytes of the checkpoint per second."""
        return self.nbytes / self.seconds


@dataclass(frozen=True, slots=True)
class Trip:
    """Saved, and loaded in each of its ways."""

    saved: Reading
    loaded: dict[str, Reading]


class Side(ranks.Ranks):
    """Ranks that hold a state. Raises SideError."""

    def __init__(self, spec: Spec, place: ranks.Place) -> None:
        self._loads, self._place = spec.loads, place.directory
        super().__init__(spec, place)

    def trip(self) -> Trip:
        """Save, forget what the page cache has of it, change the state, load. The checkpoint is removed."""
        with tempfile.TemporaryDirectory(dir=self._place, prefix="saved.") as directory:
            path = Path(directory) / "checkpoint"
            saved = self._read({"save": str(path)}, path)
            loaded = {}
            for name, how in self._loads.items():
                self._ask({"change": True})
                make_cold(path)
                loaded[name] = reading = self._read({"load": str(path), "how": dict(how)}, path)
                if reading.disk[0] < FROM_DISK * reading.nbytes:
                    raise SideError(
                        f"{self.name} loaded {reading.nbytes:,} bytes, of which {reading.disk[0]:,} came from a disk:"
                        f" {path} is not on one, or the page cache kept them"
                    )
        removed_from(self._place)
        return Trip(saved, loaded)

    def train(self, steps: int, save: str = "") -> Reading:
        """``steps`` steps behind a save in the "foreground", during one in the "background", or without."""
        with tempfile.TemporaryDirectory(dir=self._place, prefix="saved.") as directory:
            path = Path(directory) / "checkpoint"
            reading = self._read({"train": steps, "save": save, "directory": str(path)}, path)
        removed_from(self._place)
        return reading

    def _read(self, question: dict[str, Any], path: Path) -> Reading:
        with charged([process.pid for process in self._processes]) as charge:
            told = self._ask(question)
        ceilings = [one["ceiling"] - one["peak"] for one in told if one["ceiling"] is not None]
        return Reading(
            seconds=max(one["seconds"] for one in told),
            nbytes=sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
            before=max(one["before"] for one in told),
            rise=max(one["peak"] - one["before"] for one in told),
            spare=min(ceilings) if ceilings else None,
            charged=charge.rise,
            disk=(sum(one["disk"][0] for one in told), sum(one["disk"][1] for one in told)),
            told=told[0]["told"],
        )

    def _start(self, spec: ranks.Spec, place: ranks.Place) -> None:
        """As the ranks of bench_ranks.py; a rank that is alone has no process group."""
        start = partial(
            subprocess.Popen,
            [sys.executable, "-m", f"checkpoint.{spec.module}"],
            cwd=_BENCH,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        every = os.environ | {"OMP_NUM_THREADS": str(place.threads), "TIERING_DEVICE": "cpu"}
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        world = {"WORLD_SIZE": str(spec.world_size), "LOCAL_WORLD_SIZE": str(spec.world_size)}
        for rank in range(spec.world_size):
            here = {**group, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            variables = every | here if spec.world_size > 1 else every
            self._processes.append(start(env=variables, stderr=self._said[rank]))
