"""The ranks of one side, with a network to themselves where that is possible, and what their turns came to."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frame.side import Place, Side, Spec
from frame.training import Round

from .network import Network


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn came to on each rank. ``wire``: bytes that the kernel saw on a network of their own, or None."""

    ranks: list[Round]
    wire: int | None

    @property
    def steps(self) -> int:
        return self.ranks[0].steps

    @property
    def per_step(self) -> float:
        """Seconds, of the rank that took longest."""
        return max(rank.per_step for rank in self.ranks)

    @property
    def loss(self) -> float:
        """Of the last step; the mean over the ranks, as the gradient is."""
        return sum(rank.loss for rank in self.ranks) / len(self.ranks)

    def counted(self, rank: int, *prefixes: str) -> float:
        """What a rank has counted per step, in everything whose name begins in one of these ways."""
        counts = self.ranks[rank].counted.items()
        return sum(count for name, count in counts if name.startswith(prefixes)) / self.steps

    @property
    def peak(self) -> int:
        return max(rank.peak for rank in self.ranks)


class Ranks(Side):
    """As many processes as ``spec`` has ranks. Raises SideError.

    ``baseline`` is the resident memory of a rank before it builds, ``peak`` the peak after that, each of the rank that
    has most. With ``networks`` the ranks have a network to themselves, whose bytes the kernel counts.
    """

    def __init__(self, spec: Spec, place: Place, *, networks: bool) -> None:
        self.turns: list[Turn] = []
        self._network = Network() if networks else None
        super().__init__(spec, place, prefix=self._network.enter if self._network is not None else ())

    @property
    def baseline(self) -> int:
        return max(facts["baseline"] for facts in self.all_facts)

    @property
    def peak(self) -> int:
        return max(facts["peak"] for facts in self.all_facts)

    def turn(self, steps: int) -> Turn:
        """Train ``steps`` steps on every rank."""
        before = self._network.sent() if self._network is not None else 0
        rounds = [Round(**fields) for fields in self.call("train", steps=steps)]
        wire = self._network.sent() - before if self._network is not None else None
        self.turns.append(Turn(rounds, wire))
        return self.turns[-1]

    def rebuild(self, settings: Mapping[str, Any]) -> None:
        super().rebuild(settings)
        self.turns.clear()

    def traces(self, path: Path) -> list[Path]:
        """Have a whole step written on every rank; the files, whose names begin with ``path``."""
        # A step is traced from where the one before it ends.
        self.trace(Path(f"{path}.rankRANK.json"), steps=2)
        return [Path(f"{path}.rank{rank}.json") for rank in range(self.spec.ranks)]

    def close(self, *, at_once: bool = False) -> None:
        with ExitStack() as stack:
            if self._network is not None:
                stack.callback(self._network.close)
            super().close(at_once=at_once)
