"""Which sides can be there at the same time: those that meet take turns, and a process keeps its memory meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .side import Spec


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that all sides of a wave may take together, of the card and of host memory."""

    device: int
    host: int

    def holds(self, *specs: Spec) -> bool:
        return (
            sum(spec.device for spec in specs) <= self.device
            and sum(spec.host for spec in specs) <= self.host
        )


def packed(
    anchor: Sequence[Spec], units: Sequence[Sequence[Spec]], memory: Memory
) -> tuple[list[list[Spec]], list[Spec]]:
    """Waves, each with ``anchor`` and as many of ``units`` as fit, in order; and who fits into none.

    A unit stays together. Where it does not fit beside the anchor, its sides are tried one by one.
    """
    waves: list[list[Spec]] = []
    without: list[Spec] = []

    def put(unit: Sequence[Spec]) -> bool:
        for wave in waves:
            if memory.holds(*wave, *unit):
                wave.extend(unit)
                return True
        if memory.holds(*anchor, *unit):
            waves.append([*anchor, *unit])
            return True
        return False

    for unit in units:
        if not put(unit):
            without += [spec for spec in unit if not put([spec])]
    return waves, without
