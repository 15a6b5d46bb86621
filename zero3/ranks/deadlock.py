"""Deadlocks: ranks that wait for each other in different collectives. Pure functions over beats.

Collectives of several groups have no order among each other. So a rank that waits in one group, and a rank that waits
in another one, look as if both were early, until the collectives that each of them has reached are compared. The same
holds for collectives of several engines.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from zero3.ranks.store import Beat


def find(
    rank: int, beats: Mapping[int, Beat], members: Mapping[str, Collection[int]] = MappingProxyType({})
) -> dict[int, Beat]:
    """The ring of ranks that ``rank`` waits for; empty if there is none.

    In a ring, each rank waits for a collective that the next rank has not reached. ``beats``: the last known beats of
    all ranks that run, ``rank`` included. ``members``: the ranks by group, of groups that not all ranks belong to.
    """
    path: list[int] = []
    at: int | None = rank
    while at is not None and at not in path:
        path.append(at)
        waits = beats[at].waiting
        if waits is None:
            return {}
        group, number, _ = waits
        blocking = (
            candidate
            for candidate, beat in beats.items()
            if beat.waiting and candidate in members.get(group, beats) and beat.reached(group) < number
        )
        at = next(blocking, None)
    return {} if at is None else {member: beats[member] for member in path[path.index(at) :]}


def is_deadlock(before: Mapping[int, Beat], now: Mapping[int, Beat]) -> bool:
    """Whether ``before`` and ``now``, the rings of two successive looks, are one deadlock.

    The beats of one look may be of different moments. If each rank has beaten in between and is at the same place, it
    was there all the time, so all of them were there at once.
    """
    return (
        bool(now)
        and before.keys() == now.keys()
        and all(
            beat.count > before[rank].count and _place(beat) == _place(before[rank])
            for rank, beat in now.items()
        )
    )


def _place(beat: Beat) -> object:
    return beat.waiting, beat.last, beat.last_elsewhere
