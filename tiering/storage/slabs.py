"""Opens the slabs of a swap space, and divides its sections over them by the speeds of their paths."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from tiering import _logs
from tiering.config.training import format_size
from tiering.errors import SwapSpaceError
from tiering.storage.aio import AioContext
from tiering.storage.bandwidth import max_bytes, measure, weights
from tiering.storage.slab_file import SlabFile
from tiering.storage.striping import Need, apportion
from tiering.storage.swap_file import disk_of, free_by_file_system, too_full, wait_for_space

log = logging.getLogger(__name__)


class OpenSlabs(NamedTuple):
    """The slabs of all directories, the bytes planned per need and path, and the measured bytes per second by path."""

    slabs: tuple[SlabFile, ...]
    planned: list[dict[int, int]]
    weights: dict[Path, int]


def open_slabs(
    needs: Mapping[str, Need],
    directories: Sequence[Path],
    aio: AioContext,
    *,
    allow_memory_file_system: bool,
) -> OpenSlabs:
    """Open the slabs, measure those that share a section, resize each. Raises SwapSpaceError if there is no room."""
    disks = [directory.stat().st_dev for directory in directories]
    wait_for_space(
        directories,
        lambda: (
            apportion(list(needs.values()), [1] * len(disks), disks, free_by_file_system(directories))
            is not None
        ),
    )
    room = free_by_file_system(directories)
    striped = sorted({path for need in needs.values() if len(need.paths) > 1 for path in need.paths})
    planned = _apportion(needs, directories, [1] * len(disks), disks, room)
    if striped:
        _warn_of_shared_disks(needs, directories)
    slabs: list[SlabFile] = []
    with ExitStack() as on_failure:
        for index, size in enumerate(_totals(planned, len(disks))):
            # To measure, reserve only the bytes for it: the final sizes depend on the result.
            nbytes = min(size, max_bytes(aio)) if index in striped else size
            slab = SlabFile(
                directories[index], nbytes, aio, allow_memory_file_system=allow_memory_file_system
            )
            on_failure.callback(slab.close)
            slabs.append(slab)
        measured: dict[int, int] = {}
        if striped:
            measured = _measure(slabs, striped, aio)
            rates = [measured.get(index, 1) for index in range(len(disks))]
            planned = _apportion(needs, directories, rates, disks, room)
            totals = _totals(planned, len(disks))
            # Slabs that shrink come first: others may grow on the same file system.
            for slab, size in sorted(
                zip(slabs, totals, strict=True), key=lambda pair: pair[1] - pair[0].capacity
            ):
                slab.resize(size)
            _report(slabs, striped, measured)
        on_failure.pop_all()
    return OpenSlabs(tuple(slabs), planned, {directories[index]: rate for index, rate in measured.items()})


def _measure(slabs: Sequence[SlabFile], striped: Sequence[int], aio: AioContext) -> dict[int, int]:
    """The bytes per second of each path, if there are several to compare. Overwrites the files."""
    measured = [index for index in striped if slabs[index].capacity]
    if len(measured) < 2:
        return {}
    rates = measure(aio, [(slabs[index].file, slabs[index].capacity) for index in measured])
    return dict(zip(measured, weights(rates), strict=True))


def _report(slabs: Sequence[SlabFile], striped: Sequence[int], measured: Mapping[int, int]) -> None:
    for index, slab in enumerate(slabs):
        if index in striped and not slab.capacity:
            log.warning(
                "nvme_path %s is not used: by its speed and free space, none of the swap space is placed on it",
                slab.directory,
            )
        speed = f"{format_size(measured[index])}/s measured" if index in measured else "not measured"
        log.info("swap space in %s: %s, %s", slab.directory, format_size(slab.capacity), speed)


def _apportion(
    needs: Mapping[str, Need],
    directories: Sequence[Path],
    rates: Sequence[int],
    disks: Sequence[int],
    room: Mapping[int, int],
) -> list[dict[int, int]]:
    placed = apportion(list(needs.values()), rates, disks, room)
    if placed is not None:
        return placed
    if len(disks) == 1:
        total = sum(need.nbytes for need in needs.values())
        raise too_full(directories[0], total, room[disks[0]])
    requested = ", ".join(
        f"{need.nbytes} bytes for {name} in {' and '.join(str(directories[path]) for path in need.paths)}"
        for name, need in needs.items()
    )
    first = dict(zip(reversed(disks), reversed(directories), strict=True))
    free = ", ".join(f"{nbytes} in the file system of {first[disk]}" for disk, nbytes in room.items())
    raise SwapSpaceError(
        f"the swap files need {requested}, but the free space is {free}; free some space, name more directories"
        " in nvme_path, or raise host_budget so that less is swapped"
    )


def _warn_of_shared_disks(needs: Mapping[str, Need], directories: Sequence[Path]) -> None:
    # Sections often share theirs.
    for paths in {tuple(sorted(need.paths)) for need in needs.values()}:
        on_disk: defaultdict[str, list[str]] = defaultdict(list)
        for path in paths:
            on_disk[disk_of(directories[path])].append(str(directories[path]))
        for together in on_disk.values():
            if len(together) > 1:
                log.log(
                    _logs.once(logging.WARNING),
                    "nvme_path %s are on one disk: striping over them is not faster than using one of them",
                    " and ".join(together),
                )


def _totals(planned: Sequence[Mapping[int, int]], paths: int) -> list[int]:
    return [sum(by_path.get(path, 0) for by_path in planned) for path in range(paths)]
