"""Swap paths in trouble, slower than they were, or opened in a lesser way than they could be."""

from __future__ import annotations

from collections.abc import Iterator

from service.advice.finding import Advice, error, info, warning
from service.formatting import rate
from service.view import RankView, RunView
from tiering.telemetry import PathStatus

_ERRORS = {
    "EIO": (
        "the disk returned I/O errors",
        "see `dmesg` and `smartctl -a`; replace the drive, or take its directory out of nvme_path",
    ),
    "EBADMSG": (
        "checksums did not match what was written",
        "the disk, its cable or the memory changes bytes: train on another drive, from the last checkpoint",
    ),
    "ENOSPC": ("the file system is full", "free space there"),
    "EDQUOT": ("the quota is used up", "raise it, or name a directory without one in nvme_path"),
    "EROFS": (
        "the file system has become read-only",
        "it does so after errors of the disk: see `dmesg`",
    ),
}
_ANY_ERROR = ("transfers failed", "see `dmesg`, and the log of the run, which names tensors and offsets")


def errors(run: RunView) -> Iterator[Advice]:
    """By path, direction and errno."""
    for rank, path in _paths(run):
        for word, moving in (("read", path.read), ("write", path.written)):
            counted = dict(moving.errors_by_errno)
            for name, count in [*counted.items(), ("another error", moving.errors - sum(counted.values()))]:
                if count > 0:
                    means, remedy = _ERRORS.get(name, _ANY_ERROR)
                    text = f"{count} {word}{'s' * (count > 1)} of {path.path} failed with {name}: {means}"
                    yield error("io-errors", text, remedy, rank.rank)


RETRIED = 0.01  # of the operations: a few short transfers are a signal or a full queue, more are a state
FEWEST_RETRIES = 10


def retries(run: RunView) -> Iterator[Advice]:
    """Transfers that were short or interrupted, and continued."""
    for rank, path in _paths(run):
        ops, again = path.read.ops + path.written.ops, path.read.retries + path.written.retries
        if again >= max(FEWEST_RETRIES, RETRIED * ops):
            yield warning(
                "io-retries",
                f"{again} continuations of {ops} transfers of {path.path}, which were short or interrupted",
                "no byte is lost, but time is: look at `dmesg` for a drive or file system in trouble",
                rank.rank,
            )


LAGS = 0.6  # of what the fastest path makes of its measured bandwidth: swings of one disk in a quiet hour stay above
FEWEST_OPS = 100  # of a path, before its average says anything


def slow_paths(run: RunView) -> Iterator[Advice]:
    """Paths get their shares by what was measured: one that does worse than the others holds them all up."""
    for rank in run.ranks:
        paths = rank.snapshot.io if rank.fresh and rank.snapshot is not None else []
        made = [
            (_average(path), path.measured_bytes_per_second, path.path)
            for path in paths
            if path.measured_bytes_per_second and path.read.ops + path.written.ops >= FEWEST_OPS
        ]
        best = max((now / measured for now, measured, _ in made), default=0.0)
        for now, measured, name in made:
            if now / measured < LAGS * best:
                yield warning(
                    "io-slow-path",
                    f"{name} moves {rate(now)}, {rate(measured)} were measured at the start: it has a larger share of"
                    " each transfer than it can take, and the others wait for it",
                    "look at what else uses that drive; a new start measures anew, and shares accordingly",
                    rank.rank,
                )


def _average(path: PathStatus) -> float:
    return max(path.read.average_bytes_per_second, path.written.average_bytes_per_second)


def page_cache(run: RunView) -> Iterator[Advice]:
    """Paths that are not opened with O_DIRECT."""
    for rank, path in _paths(run):
        if not path.direct:
            yield warning(
                "io-buffered",
                f"{path.path} is not opened with O_DIRECT: its bytes go through the page cache, and take memory twice",
                f"name a directory on ext4 or XFS in nvme_path; `tiering doctor {path.path}` says what is lacking",
                rank.rank,
            )


_PASSED_OVER = {
    "io_uring": "allow io_uring_setup, io_uring_enter and io_uring_register in the container's seccomp profile, and set"
    " kernel.io_uring_disabled to 0; it takes less CPU for the same bandwidth",
    "libaio": "raise fs.aio-max-nr, and allow io_setup, io_submit and io_getevents in the container's seccomp profile",
    "registered_buffers": "raise the limit of locked memory to the host budget: `ulimit -l`, LimitMEMLOCK= in a unit,"
    " `--ulimit memlock=-1` for a container; it saves CPU time, not bandwidth",
}


def passed_over(run: RunView) -> Iterator[Advice]:
    """Engines and registrations that were not to be had."""
    for rank in run.ranks:
        engine = rank.snapshot.io_engine if rank.fresh and rank.snapshot is not None else None
        if engine is None:
            continue
        for what, why in engine.passed_over.items():
            text = f"{what} is not in use: {why}; the I/O engine is {engine.name}"
            remedy = _PASSED_OVER.get(what, "`tiering doctor` says what it needs")
            yield info("io-passed-over", text, remedy, rank.rank)


def _paths(run: RunView) -> Iterator[tuple[RankView, PathStatus]]:
    for rank in run.ranks:
        for path in rank.snapshot.io if rank.fresh and rank.snapshot is not None else []:
            yield rank, path
