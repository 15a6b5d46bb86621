"""Striping: how much of the swap space each path gets, and the path and offset of each byte of an extent. Pure.

Paths are numbered; weights are their bandwidths. A plan is made in two steps. ``apportion`` divides the size of each
kind of state over its paths, in proportion to weight as far as there is room, and in any way that fits otherwise. Each
extent then gets its shares in proportion to the *remaining* part of that division, so that the last one fits, too.

An extent is cut into rows, each row into one contiguous piece per path, and a path's pieces lie one behind the other
in its part of the extent. A transfer of k rows is at most k pieces per path, and any range longer than a row uses
every path in proportion. Rows are equal to within a page per path: of P pages on a path, row r of n holds those from
P*r//n to P*(r+1)//n, which adds up without remainders and needs no table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tiering.storage.arena import PAGE, round_up

SMALLEST_SHARE = 4 << 20  # of a row: a few blocks, so that each path has its queue filled by one row
LARGEST_ROW = 64 << 20  # a very slow path has smaller pieces instead of longer rows
# A smaller extent lies on one path: striping would only make more, smaller requests.
SMALLEST_STRIPED = 2 << 20


@dataclass(frozen=True)
class Need:
    """``nbytes`` of swap space, a multiple of 4096, on some of ``paths``."""

    nbytes: int
    paths: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """Bytes [start, start + nbytes) of an extent: on ``path``, from ``offset`` of what the extent has there."""

    path: int
    offset: int
    start: int
    nbytes: int


class StripeMap:
    """The places of the bytes of an extent with ``shares[i]`` bytes (multiples of 4096) on path i."""

    def __init__(self, shares: Sequence[int]) -> None:
        self._pages = [share // PAGE for share in shares]
        self.nbytes = sum(shares)
        several = sum(pages > 0 for pages in self._pages) > 1
        self.rows = max(1, self.nbytes // row_bytes(shares)) if several else 1

    def pieces(self, offset: int, nbytes: int) -> Iterator[Piece]:
        """The pieces of [offset, offset + nbytes), in the extent's order, joined where they adjoin on the path too."""
        last: Piece | None = None
        for piece in self._cut(offset, offset + nbytes):
            if last is not None and last.path == piece.path:
                last = Piece(last.path, last.offset, last.start, last.nbytes + piece.nbytes)
                continue
            if last is not None:
                yield last
            last = piece
        if last is not None:
            yield last

    def _cut(self, offset: int, end: int) -> Iterator[Piece]:
        # Rounding lets rows start up to a page per path early, never late: this is offset's row or the one before.
        row = offset * self.rows // max(self.nbytes, 1)
        at = sum(pages * row // self.rows for pages in self._pages) * PAGE
        while at < end:
            for path, pages in enumerate(self._pages):
                before = pages * row // self.rows * PAGE
                after = at + pages * (row + 1) // self.rows * PAGE - before
                first, stop = max(at, offset), min(after, end)
                if first < stop:
                    yield Piece(path, before + first - at, first, stop - first)
                at = after
            row += 1


def row_bytes(weights: Sequence[int]) -> int:
    """Bytes of a row whose smallest share is ``SMALLEST_SHARE``, at most ``LARGEST_ROW``."""
    smallest = min((weight for weight in weights if weight > 0), default=1)
    return min(LARGEST_ROW, round_up(SMALLEST_SHARE * sum(weights) // smallest))


def shares_of(nbytes: int, remaining: Sequence[int], planned: Sequence[int]) -> list[int] | None:
    """The shares of a new extent, if ``remaining`` of the ``planned`` bytes per path are free; None if it does not fit.

    ``nbytes`` and ``remaining`` are multiples of 4096. A small extent lies on the path with most of its plan free.
    """
    if nbytes > sum(remaining):
        return None
    if nbytes < SMALLEST_STRIPED:
        fitting = [path for path, room in enumerate(remaining) if room >= nbytes]
        if fitting:
            emptiest = max(fitting, key=lambda path: remaining[path] / planned[path])
            return [nbytes if path == emptiest else 0 for path in range(len(remaining))]
    return [pages * PAGE for pages in divide(nbytes // PAGE, [room // PAGE for room in remaining])]


def divide(total: int, weights: Sequence[int]) -> list[int]:
    """``total`` in parts that differ from their proportion by less than 1; no part exceeds its weight if all fit."""
    whole = sum(weights)
    parts = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: -(total * weights[i] % whole))
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return parts


def apportion(
    needs: Sequence[Need], weights: Sequence[int], disks: Sequence[int], room: Mapping[int, int]
) -> list[dict[int, int]] | None:
    """Bytes per path for each need, in proportion to ``weights`` where there is room; None if they do not fit.

    ``disks[path]`` is the file system of a path, ``room`` the bytes free in each. It finds a solution whenever there is
    one, as long as the needs have at most two different sets of paths.
    """
    free = {disk: nbytes // PAGE for disk, nbytes in room.items()}
    placed: list[Counter[int]] = [Counter() for _ in needs]
    # The need with the fewest disks goes first.
    for index in sorted(range(len(needs)), key=lambda i: len({disks[path] for path in needs[i].paths})):
        missing = _fill(placed[index], needs[index], weights, disks, free)
        if missing and _make_room(placed, index, missing, needs, disks, free):
            return None
    return [
        {path: pages[path] * PAGE for path in need.paths} for pages, need in zip(placed, needs, strict=True)
    ]


def _fill(
    placed: Counter[int], need: Need, weights: Sequence[int], disks: Sequence[int], free: dict[int, int]
) -> int:
    """Place a need in proportion to weight; pages beyond a disk's room go to other disks. Returns unplaced pages."""
    pages, paths = need.nbytes // PAGE, list(need.paths)
    while pages and paths:
        ideal = dict(zip(paths, divide(pages, [weights[path] for path in paths]), strict=True))
        requested: Counter[int] = Counter()
        for path, part in ideal.items():
            requested[disks[path]] += part
        full = {disk for disk in requested if requested[disk] > free[disk]}
        for disk in full or requested.keys():
            inside = [path for path in paths if disks[path] == disk]
            parts = (
                divide(min(requested[disk], free[disk]), [weights[path] for path in inside]) if full else None
            )
            for path, part in zip(inside, parts or [ideal[path] for path in inside], strict=True):
                placed[path] += part
                free[disk] -= part
                pages -= part
        paths = [path for path in paths if disks[path] not in full]
    return pages


def _make_room(
    placed: list[Counter[int]],
    index: int,
    missing: int,
    needs: Sequence[Need],
    disks: Sequence[int],
    free: dict[int, int],
) -> int:
    """Move other needs from the paths of ``needs[index]`` to paths that it cannot use. Returns unplaced pages."""
    for target in needs[index].paths:
        for owner, need in enumerate(needs):
            if owner == index:
                continue
            for source in [path for path in need.paths if disks[path] == disks[target]]:
                for refuge in need.paths:
                    moved = min(missing, placed[owner][source], free[disks[refuge]])
                    placed[owner][source] -= moved
                    placed[owner][refuge] += moved
                    placed[index][target] += moved
                    free[disks[refuge]] -= moved
                    missing -= moved
    return missing
