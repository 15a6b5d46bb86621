"""Swap paths with errors, with less bandwidth than measured, or opened without O_DIRECT or io_uring."""

from __future__ import annotations

from collections.abc import Iterator

from service.advice.advice import Advice, error, info, warning
from service.formatting import rate, share
from service.view import RankView, RunView
from tiering.telemetry import PathStatus

_ERRORS = {
    "EIO": (
        "the disk returned I/O errors",
        "see `dmesg` and `smartctl -a`; replace the drive, or remove its directory from nvme_path",
    ),
    "EBADMSG": (
        "checksums do not match the written data",
        "the disk, its cable or the memory corrupts data: continue on another drive from the last checkpoint",
    ),
    "ENOSPC": ("the file system is full", "free space there"),
    "EDQUOT": ("the quota is used up", "raise the quota, or name a directory without a quota in nvme_path"),
    "EROFS": (
        "the file system has become read-only",
        "Linux does this after disk errors: see `dmesg`",
    ),
}
_ANY_ERROR = ("transfers failed", "see `dmesg`, and the log of the run, which has the tensors and offsets")


def errors(run: RunView) -> Iterator[Advice]:
    """I/O errors by path, direction and errno."""
    for rank, path in _paths(run):
        for operation, direction in (("read", path.read), ("write", path.written)):
            by_errno = dict(direction.errors_by_errno)
            for name, count in [
                *by_errno.items(),
                ("another error", direction.errors - sum(by_errno.values())),
            ]:
                if count > 0:
                    meaning, remedy = _ERRORS.get(name, _ANY_ERROR)
                    text = (
                        f"{count} {operation}{'s' * (count > 1)} of {path.path} failed with {name}: {meaning}"
                    )
                    yield error("io-errors", text, remedy, rank.rank)


# Fraction of the operations. In a healthy run, signals and full queues cause a few short transfers.
RETRY_FRACTION = 0.01
MIN_RETRIES = 10


def retries(run: RunView) -> Iterator[Advice]:
    """Short or interrupted transfers, which the engine continues."""
    for rank, path in _paths(run):
        ops, retried = path.read.ops + path.written.ops, path.read.retries + path.written.retries
        if retried >= max(MIN_RETRIES, RETRY_FRACTION * ops):
            yield warning(
                "io-retries",
                f"{retried} retries in {ops} transfers of {path.path}: transfers were short or interrupted",
                "no data is lost, but retries take time: check `dmesg` for problems of the drive or file system",
                rank.rank,
            )


def rereads(run: RunView) -> Iterator[Advice]:
    """Reads that succeeded in the second or third attempt: the drive, or the way to it, is about to fail."""
    for rank, path in _paths(run):
        count = path.read.rereads
        if count:
            yield warning(
                "io-rereads",
                f"{count} read{'s' * (count > 1)} of {path.path} had to be tried again after an error",
                "no data is lost as long as the next attempt succeeds: check `dmesg` and `smartctl -a`, and save"
                " checkpoints to another drive",
                rank.rank,
            )


# Relative to the path that reaches the largest fraction of its measured bandwidth: the normal variation of an otherwise
# idle disk stays above.
SLOW_FRACTION = 0.6
MIN_OPS = 100  # of a path, for a meaningful average


def slow_paths(run: RunView) -> Iterator[Advice]:
    """Paths get data in proportion to their measured bandwidth: one that becomes slower delays all."""
    for rank in run.ranks:
        paths = rank.snapshot.io if rank.fresh and rank.snapshot is not None else []
        figures = [
            (path.recent_bytes_per_second or _average(path), path.measured_bytes_per_second, path.path)
            for path in paths
            if path.measured_bytes_per_second and path.read.ops + path.written.ops >= MIN_OPS
        ]
        best = max((current / measured for current, measured, _ in figures), default=0.0)
        for current, measured, name in figures:
            if current / measured < SLOW_FRACTION * best:
                yield warning(
                    "io-slow-path",
                    f"{name} reaches {rate(current)}, but {rate(measured)} were measured at the start: its part of"
                    " each transfer is too large, and the other paths wait for it",
                    "check what else uses that drive, and `smartctl -a`; a restart measures the paths again and adjusts"
                    " their parts (until then, only new extents, such as those of activations, use less of the path)",
                    rank.rank,
                )


# Of its endurance. The drive may work for longer, but its maker does not promise it.
WORN_FRACTION = 0.9


def worn(run: RunView) -> Iterator[Advice]:
    """Drives that have used up most of their endurance."""
    for rank, path in _paths(run):
        if path.drive is not None and path.drive.used >= WORN_FRACTION:
            yield warning(
                "drive-worn",
                f"a drive of {path.path} has used {share(path.drive.used)} of its endurance, by its own estimate",
                "save checkpoints to another drive, and plan to replace it (`smartctl -a`); a larger host budget or a"
                " smaller state format writes less",
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
                f"{path.path} is not opened with O_DIRECT: its data goes through the page cache and takes memory twice",
                f"name a directory on ext4 or XFS in nvme_path; `tiering doctor {path.path}` shows what is missing",
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
    """I/O engines and buffer registration that the system refuses."""
    for rank in run.ranks:
        engine = rank.snapshot.io_engine if rank.fresh and rank.snapshot is not None else None
        if engine is None:
            continue
        for feature, reason in engine.passed_over.items():
            use = "used for a part of the memory only" if feature in engine.flags else "not in use"
            text = f"{feature} is {use}: {reason}; the I/O engine is {engine.name}"
            remedy = _PASSED_OVER.get(feature, "`tiering doctor` shows what it needs")
            yield info("io-passed-over", text, remedy, rank.rank)


def _paths(run: RunView) -> Iterator[tuple[RankView, PathStatus]]:
    for rank in run.ranks:
        for path in rank.snapshot.io if rank.fresh and rank.snapshot is not None else []:
            yield rank, path
