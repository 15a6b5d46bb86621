"""The figures that the ranks exchange before a step: they agree on the norm, and on what else a step depends on."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optim_cpu.kernels import ExactSum
from tiering.errors import RankOrderError
from zero3.loop import hyperparameters
from zero3.ranks.collectives import Collectives


class RankFigures(NamedTuple):
    """The figures of one rank: a row of float64, with the limbs of ``squares`` at its end.

    ``bad`` is the index of a parameter whose gradient is not finite, or -1. ``options`` is a digest of the
    hyperparameters that the step uses.
    """

    bad: float
    loss: float
    stop: float
    steps: float
    saving: float
    squares: ExactSum
    options: float = 0.0

    def row(self) -> Tensor:
        """The figures as they are sent."""
        *figures, squares, options = self
        return torch.tensor([*figures, options, *squares.limbs()], dtype=torch.float64, device="cpu")

    @classmethod
    def of_row(cls, row: Sequence[float]) -> RankFigures:
        """The inverse of ``row``."""
        bad, loss, stop, steps, saving, options, *limbs = row
        return cls(bad, loss, stop, steps, saving, ExactSum.of_limbs(limbs), options)


@dataclass(frozen=True)
class StepFigures:
    """The figures of all ranks: the norm of the gradients, and ``bad``, the first parameter that is not finite, or "".

    ``loss`` is the mean loss, ``stop`` the number of a stop signal that a rank has received, ``saving`` the progress of
    the slowest rank with a save.
    """

    norm: float
    bad: str
    loss: float | None
    stop: int
    saving: int

    @classmethod
    def of_ranks(
        cls,
        figures: Sequence[RankFigures],
        names: Mapping[int, str],
        *,
        has_loss: bool,
        own: Collection[int] | None = None,
    ) -> StepFigures:
        """From those of each rank, and the ``names`` of the parameters by index.

        ``own`` are the ranks with the same parameters, None: all.
        """
        bad = [(each.bad, rank) for rank, each in enumerate(figures) if each.bad >= 0]
        first = min((index for index, rank in bad if own is None or rank in own), default=-1.0)
        elsewhere = f"a parameter of rank {bad[0][1]}" if bad else ""
        return cls(
            norm=math.sqrt(float(ExactSum.total(each.squares for each in figures))),
            bad=names.get(int(first), elsewhere),
            loss=sum(each.loss for each in figures) / len(figures) if has_loss else None,
            stop=next((int(each.stop) for each in figures if each.stop), 0),
            saving=int(min(each.saving for each in figures)),
        )


def exchange(local: RankFigures, options: Any, collectives: Collectives, purpose: str) -> list[RankFigures]:
    """The figures of all ranks, where ``local`` are those of this one, which steps with ``options``.

    RankOrderError unless all ranks are in the same step; they must have the same options.
    """
    local = local._replace(options=hyperparameters.digest(options))
    rows = collectives.run_tables.table(local.row(), purpose)
    figures = [RankFigures.of_row(row) for row in rows.tolist()]
    step = int(local.steps) + 1
    for rank, rank_figures in enumerate(figures):
        if rank_figures.steps != local.steps:
            raise RankOrderError(
                f"rank {collectives.world.rank} is in step {step}, rank {rank} in step"
                f" {rank_figures.steps + 1:.0f}: call step() equally often on all ranks"
            )
    tables = collectives.tables
    if any(figures[rank].options != local.options for rank in tables.ranks):
        # All ranks of the partition have the same rows, so either all or none reach this collective.
        of_all = tables.gather_objects(options, "exchange the hyperparameters")
        hyperparameters.check_same(dict(zip(tables.ranks, of_all, strict=True)), step)
    collectives.finish_step()
    return figures
