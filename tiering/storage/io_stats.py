"""The counters and features of an I/O context: frozen records of the C structures."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import add
from typing import Any

from tiering._aio import ffi, lib

_FLAGS = {
    lib.AIO_USES_REGISTERED_BUFFERS: "registered_buffers",
    lib.AIO_USES_REGISTERED_FILES: "registered_files",
    lib.AIO_USES_SINGLE_ISSUER: "single_issuer",
    lib.AIO_USES_DEFER_TASKRUN: "defer_taskrun",
    lib.AIO_USES_COOP_TASKRUN: "coop_taskrun",
    lib.AIO_USES_VERIFY: "verify",
    lib.AIO_USES_WORKERS: "workers",
}


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The engine of an I/O context and its features in use.

    ``flags`` are names such as "registered_buffers" or "verify"; ``registered_bytes`` is memory that the kernel
    has pinned. ``passed_over`` says why something is not in use: the engines that "auto" tried first,
    and "registered_buffers" or "registered_files" where that was refused, at least in part.
    """

    engine: str
    flags: tuple[str, ...]
    registered_bytes: int
    passed_over: dict[str, str]


@dataclass(frozen=True, slots=True)
class DirectionStats:
    """Counted in C. ``latency[i]`` counts the operations that took [2^i, 2^(i+1)) ns, ``latency_ns`` is their sum.

    ``bytes`` are the requested bytes that were moved, without padding; ``busy_ns`` the time with an operation in
    flight, so ``bytes / busy_ns`` is the bandwidth in GB/s; ``retries`` the continuations of short or interrupted
    transfers, and the ``rereads``: reads that were tried again after EIO, ETIMEDOUT or ENOLINK; ``errors_by_errno``
    splits ``errors`` (0: those beyond the first few kinds).
    """

    bytes: int
    ops: int
    retries: int
    rereads: int
    errors: int
    in_flight: int
    busy_ns: int
    latency_ns: int
    latency: tuple[int, ...]
    errors_by_errno: dict[int, int]

    def __add__(self, other: DirectionStats) -> DirectionStats:
        """The counters of two files together; ``busy_ns`` counts the time twice in which both are busy."""
        return DirectionStats(
            bytes=self.bytes + other.bytes,
            ops=self.ops + other.ops,
            retries=self.retries + other.retries,
            rereads=self.rereads + other.rereads,
            errors=self.errors + other.errors,
            in_flight=self.in_flight + other.in_flight,
            busy_ns=self.busy_ns + other.busy_ns,
            latency_ns=self.latency_ns + other.latency_ns,
            latency=tuple(map(add, self.latency, other.latency)),
            errors_by_errno=dict(Counter(self.errors_by_errno) + Counter(other.errors_by_errno)),
        )


@dataclass(frozen=True, slots=True)
class FileStats:
    """One file of a context. ``queue_full_ns`` is the time in which requests waited because the queue was full."""

    name: str
    direct: bool
    read: DirectionStats
    write: DirectionStats
    flush: DirectionStats
    queue_full_ns: int

    def __add__(self, other: FileStats) -> FileStats:
        """The counters of two files together, under the name of the first."""
        return FileStats(
            self.name,
            self.direct and other.direct,
            self.read + other.read,
            self.write + other.write,
            self.flush + other.flush,
            self.queue_full_ns + other.queue_full_ns,
        )


def engine_info(raw: Any) -> EngineInfo:
    """An ``aio_info`` as a record."""
    refused = {
        "io_uring": raw.io_uring_error,
        "libaio": raw.libaio_error,
        "registered_buffers": raw.buffers_error,
        "registered_files": raw.files_error,
    }
    return EngineInfo(
        engine=ffi.string(raw.engine).decode(),
        flags=tuple(name for flag, name in _FLAGS.items() if raw.flags & flag),
        registered_bytes=raw.registered_bytes,
        passed_over={feature: errno_text(-code) for feature, code in refused.items() if code},
    )


def file_stats(name: str, direct: bool, raw: Any) -> FileStats:
    """An ``aio_file_stats`` as a record."""
    read, write, flush = (_direction(raw.kind[kind]) for kind in (lib.AIO_READ, lib.AIO_WRITE, lib.AIO_FLUSH))
    return FileStats(name, direct, read, write, flush, raw.queue_full_ns)


def totals_by_path(
    stats: Iterable[FileStats], paths: Mapping[str, str]
) -> list[tuple[FileStats, tuple[int, ...]]]:
    """The counters of each path, and the numbers of its files. ``paths``: those of files with another name."""
    totals: dict[str, tuple[FileStats, tuple[int, ...]]] = {}
    for number, each in enumerate(stats):
        path = paths.get(each.name, each.name)
        total, numbers = totals.get(path, (None, ()))
        total = replace(each, name=path) if total is None else total + each
        totals[path] = total, (*numbers, number)
    return list(totals.values())


def errno_text(code: int) -> str:
    """An errno in words: "EIO (Input/output error)"."""
    return f"{errno.errorcode.get(code, code)} ({os.strerror(code)})"


def _direction(raw: Any) -> DirectionStats:
    return DirectionStats(
        bytes=raw.bytes,
        ops=raw.ops,
        retries=raw.retries,
        rereads=raw.rereads,
        errors=raw.errors,
        in_flight=raw.in_flight,
        busy_ns=raw.busy_ns,
        latency_ns=raw.latency_ns,
        latency=tuple(raw.latency),
        errors_by_errno={counted.error: counted.count for counted in raw.by_errno if counted.count},
    )
