"""Ranks that wait for each other: a knot that nobody can undo. Pure.

Collectives of several groups have no order among each other, so a rank that waits in one and a rank that waits in
another look like two that are early, until one sees that each waits for the other. The same of several engines.
"""

from __future__ import annotations

from collections.abc import Mapping

from zero3.ranks.store import Beat


def find(rank: int, beats: Mapping[int, Beat]) -> dict[int, Beat]:
    """The ring that ``rank`` waits for: each for a collective that the next has not come to; empty if there is none.

    ``beats`` are those of all ranks that run, ``rank`` included, as far as they are known.
    """
    path: list[int] = []
    at: int | None = rank
    while at is not None and at not in path:
        path.append(at)
        waits = beats[at].waiting
        if waits is None:
            return {}
        group, number, _ = waits
        blocking = (other for other, beat in beats.items() if beat.waiting and beat.reached(group) < number)
        at = next(blocking, None)
    return {} if at is None else {member: beats[member] for member in path[path.index(at) :]}


def is_tied(before: Mapping[int, Beat], now: Mapping[int, Beat]) -> bool:
    """Whether a ring that was found twice is one: its beats may be of different moments.

    A rank that has beaten in between, and is where it was, was there all the time: so all of them were at once.
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
    return beat.waiting, beat.said, beat.said_elsewhere
