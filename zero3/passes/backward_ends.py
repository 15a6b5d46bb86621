"""What ranks tell each other at the end of a backward, or when a rank has no room: a row of a table from each rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tiering.errors import RankOrderError

_HEAD = (
    3  # numbers before the order: the backward, whether it is the last one of its step, whether it has ended
)


@dataclass(frozen=True)
class BackwardEnds:
    """The rows of all ranks together. ``late`` are groups, ``received`` pieces with a gradient on any rank."""

    all_ended: bool
    order: list[int]  # that rank 0 has measured
    late: list[int]
    received: list[int]


class EndTable:
    """The format of the table, for ``groups`` groups, ``trained`` of which are in the order, and ``pieces`` pieces."""

    def __init__(self, groups: int, trained: int, pieces: int) -> None:
        self._groups = groups
        self._pieces = pieces
        self._head_nbytes = 4 * (_HEAD + trained)
        self._late_nbytes = -(-groups // 8)
        self.row_nbytes = self._head_nbytes + self._late_nbytes + -(-pieces // 8)

    def row(
        self,
        backward: int,
        *,
        last: bool,
        ended: bool,
        order: Sequence[int],
        late: Collection[int],
        received: Collection[int],
    ) -> Tensor:
        """The row of this rank: the number of its backward, and whether that is the ``last`` of its step.

        ``ended``: the backward has ended; if not, this rank has no room. ``order``: the groups as this rank has
        finished them. ``late`` groups wait to be reduced once more; ``received`` pieces have a gradient here.
        """
        head = np.array([backward, last, ended, *order], np.int32).view(np.uint8)
        bits = [_packed(late, self._groups), _packed(received, self._pieces)]
        return torch.from_numpy(np.concatenate([head, *bits]))

    def read(self, table: Tensor) -> BackwardEnds:
        """The rows of all ranks, by rank. RankOrderError if a rank is at the end of another backward than rank 0."""
        rows = table.numpy()
        heads = np.ascontiguousarray(rows[:, : self._head_nbytes]).view(np.int32)
        _check_in_step(heads[:, :2].tolist())
        bits = np.bitwise_or.reduce(rows[:, self._head_nbytes :])
        return BackwardEnds(
            all_ended=bool(heads[:, 2].all()),
            order=heads[0, _HEAD:].tolist(),
            late=_unpacked(bits[: self._late_nbytes], self._groups),
            received=_unpacked(bits[self._late_nbytes :], self._pieces),
        )


def _packed(indices: Collection[int], count: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    marks = np.zeros(count, dtype=bool)
    marks[list(indices)] = True
    return np.packbits(marks)


def _unpacked(bits: np.ndarray[tuple[int], np.dtype[np.uint8]], count: int) -> list[int]:
    indices: list[int] = np.flatnonzero(np.unpackbits(bits, count=count)).tolist()
    return indices


def _check_in_step(heads: list[list[int]]) -> None:
    for rank, head in enumerate(heads):
        if head != heads[0]:
            ends = [
                f"backward {number}, {'the' if last else 'not the'} last of its step"
                for number, last in heads
            ]
            raise RankOrderError(
                f"rank 0 has ended {ends[0]}, rank {rank} has ended {ends[rank]}: call backward and step equally"
                " often on all ranks, and no_sync() on all or none"
            )
