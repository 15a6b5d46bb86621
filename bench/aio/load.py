"""What both sides are asked to do, and what either answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["read", "write", "mixed"]
Pattern = Literal["sequential", "random"]


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks of ``block`` bytes, ``depth`` of them in flight, over the ``size`` bytes of the file at ``path``.

    ``read_percent`` of the blocks of a mixed load are reads; only fio takes another share than half.
    """

    path: str
    size: int
    direct: bool
    block: int
    depth: int
    kind: Kind
    pattern: Pattern = "sequential"
    read_percent: int = 50


@dataclass(frozen=True, slots=True)
class Reading:
    """One run of one side: bytes moved, the seconds from the first submission to the last completion, and the
    CPU seconds (user and system) spent meanwhile.

    ``whole_cpu_seconds`` is of the whole process where it was started for this run, start and end included.
    """

    nbytes: int
    seconds: float
    cpu_seconds: float
    block: int
    whole_cpu_seconds: float | None = None

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / self.seconds / 1e9

    @property
    def cpu_per_gb(self) -> float:
        """CPU seconds per 10^9 bytes."""
        return self.cpu_seconds / (self.nbytes / 1e9)

    @property
    def ns_per_op(self) -> float:
        """Wall nanoseconds per block."""
        return self.seconds * 1e9 / (self.nbytes / self.block)
