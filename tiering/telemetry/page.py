"""The page: a file that one rank writes and anybody of the same user reads.

A page is a file: a fixed header, a JSON payload that is replaced again and again, and behind its room another one,
the description, that never changes. Any number of readers look at it while one writer updates it, and neither side can
hurt the other:

* Sequence lock. The writer makes the sequence number odd, writes the payload, then writes the whole header
  with the next even number. A reader takes no lock: it reads header, payload, header again, and tries once
  more when the number was odd or moved. A CRC32 over heartbeat, length and payload catches what the number
  cannot.
* No mapping on either side. Both use pread and pwrite on the page cache. A mapped page that someone
  truncates, or that a full tmpfs cannot back, is a SIGBUS in the middle of training; a short read is a state
  that a reader can name. Four publications a second cost the same either way.
* Alive means locked. The writer holds flock(LOCK_EX) for its life; the kernel drops it however that life
  ends. A pid says nothing across containers, and a heartbeat stops for a debugger too. A forked child shares
  the lock's open file description, so it closes its copy at once, without unlocking.
* Appearing whole. A page is created under a name that no reader looks at, locked, then renamed. Whoever finds
  an unlocked page may therefore remove it: its writer is dead. This rule and the first 12 bytes (magic,
  version) hold for every version of the format. Within a version headers only grow: who reads takes what it knows.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import struct
import threading
import time
import weakref
import zlib
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import ValidationError

from tiering.errors import TelemetryError
from tiering.telemetry.description import Description
from tiering.telemetry.directory import private_directory, run_directory
from tiering.telemetry.snapshot import Snapshot

MAGIC = b"TIERPAGE"
VERSION = 1
CAPACITY = 64 << 10  # bytes of payload; one of three tiers, four paths and 32 steps takes about 20 KiB
SUFFIX = ".page"
RECENT_STEPS = 32
_WRITERS_NAME = re.compile(r".+\.[0-9]+\.[0-9]+-[0-9a-f]+", re.DOTALL)


State = Literal["live", "stale", "newer-version", "torn", "unreadable"]


class _Header(NamedTuple):
    magic: bytes
    version: int
    header_size: int
    capacity: int
    sequence: int
    heartbeat_ns: int  # CLOCK_REALTIME
    length: int
    crc: int
    description_crc: int = 0
    description_length: int = 0  # bytes at header_size + capacity; 0 where there is none

    def pack(self) -> bytes:
        return _HEADER.pack(*self)

    @classmethod
    def unpack(cls, raw: bytes) -> _Header:
        """Of a header as its writer knew it: what an older one lacks is zero."""
        return cls(*_HEADER.unpack(raw[: _size_of(raw)].ljust(_HEADER.size, b"\0")))


_HEADER = struct.Struct("<8sIIQQQQIIQ")
_OLDEST_HEADER = 56  # bytes: that of version 1 without a description


def _size_of(raw: bytes) -> int:
    return int.from_bytes(raw[12:16], "little")


_SEQUENCE = struct.Struct("<Q")
_SEQUENCE_OFFSET = 24
_SANE_PAYLOAD = (
    4 * CAPACITY
)  # a header that promises more than this is garbage, and would cost its readers much
LARGEST_DESCRIPTION = 256 << 10  # bytes; that of a usual run takes about 10 KiB


def plain_name(run_name: str) -> str:
    """``run_name`` as file names spell it."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", run_name)[:80] or "run"


def as_text(text: str) -> str:
    """``text`` as a page can hold it: bytes of a file name that are no characters are "?"."""
    return text.encode("utf-8", "replace").decode()


def _checksum(heartbeat_ns: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(struct.pack("<QQ", heartbeat_ns, len(payload))))


def _locked_by_another(fd: int) -> bool:
    """Whether a writer holds the page open as ``fd``; the lock taken to find out is given back at once."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


_inherited: weakref.WeakSet[PageWriter] = weakref.WeakSet()
_forking = threading.RLock()  # held while a page is made: no child gets a lock that it knows nothing of


class PageWriter:
    """One rank's page. Creating it sweeps the pages of dead writers; closing it removes its own.

    ``publish`` may be called from any thread. In a forked child the writer is closed and publishes nothing.
    A ``description`` that takes more than a page may loses settings. Raises TelemetryError where a page cannot be.
    """

    path: Path

    def __init__(
        self,
        run_name: str,
        rank: int = 0,
        world_size: int = 1,
        directory: Path | None = None,
        description: Description | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is outside a world of {world_size}")
        directory = run_directory() if directory is None else private_directory(Path(directory))
        with suppress(OSError):  # whether there can be a page shows when it is made
            sweep(directory)
        self._description = b"" if description is None else description.fitted(LARGEST_DESCRIPTION).encode()
        if len(self._description) > LARGEST_DESCRIPTION:
            raise TelemetryError(
                f"the description of run {run_name!r} takes {len(self._description)} bytes without its settings;"
                f" a page holds {LARGEST_DESCRIPTION}"
            )
        name = f"{plain_name(run_name)}.{rank}.{os.getpid()}-{secrets.token_hex(4)}"
        self.path = directory / (name + SUFFIX)
        self._lock = threading.Lock()
        self._sequence = 0
        with _forking:
            self._fd = self._create(directory / (name + ".new"))
            _inherited.add(self)

    def _create(self, unfinished: Path) -> int:
        fd = -1
        try:
            fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)  # waits for a sweep that is just asking whose it is
            # A full disk shows here, not during training.
            os.posix_fallocate(fd, 0, _HEADER.size + CAPACITY + len(self._description))
            os.pwrite(fd, self._description, _HEADER.size + CAPACITY)
            os.pwrite(fd, self._header(0, b"").pack(), 0)
            unfinished.rename(self.path)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
                unfinished.unlink(missing_ok=True)
            raise TelemetryError(
                f"page {self.path} cannot be created: {error.strerror}; "
                "free space there, or set TIERING_RUN_DIR"
            ) from error
        return fd

    def _header(self, heartbeat_ns: int, payload: bytes) -> _Header:
        return _Header(
            MAGIC,
            VERSION,
            _HEADER.size,
            CAPACITY,
            self._sequence,
            heartbeat_ns,
            len(payload),
            _checksum(heartbeat_ns, payload),
            zlib.crc32(self._description),
            len(self._description),
        )

    def publish(self, snapshot: Snapshot) -> None:
        """Replace the page's content.

        Raises TelemetryError when the snapshot does not fit, OSError when the file system refuses, ValueError
        after ``close``.
        """
        payload = _fitted(snapshot)
        with self._lock:
            if self._fd == _ABANDONED:
                return
            if self._fd < 0:
                raise ValueError(f"publish on the closed page {self.path}")
            self._sequence = (self._sequence + 1) | 1  # odd also after an update that an exception ended
            os.pwrite(self._fd, _SEQUENCE.pack(self._sequence), _SEQUENCE_OFFSET)
            os.pwrite(self._fd, payload, _HEADER.size)
            self._sequence += 1
            os.pwrite(self._fd, self._header(time.time_ns(), payload).pack(), 0)

    def close(self) -> None:
        """Remove the page and let go of its lock. Idempotent."""
        with self._lock:
            if self._fd < 0:
                return
            # Training must not fail for its page at the end; what stays has no lock, and is swept.
            with suppress(OSError):
                self.path.unlink()
            # A child forked between these two finds no descriptor to close; closing first, it would find another's.
            fd, self._fd = self._fd, _CLOSED
            os.close(fd)

    def _abandon(self) -> None:
        """In a forked child: drop the shared description, leave page and lock to the parent."""
        self._lock = threading.Lock()  # the fork may have happened while another thread held the old one
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = _ABANDONED


_CLOSED, _ABANDONED = -1, -2


def _abandon_inherited() -> None:
    _forking.release()
    for one in list(_inherited):
        one._abandon()


os.register_at_fork(
    before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_abandon_inherited
)


def _fitted(snapshot: Snapshot) -> bytes:
    """The payload, with as many of the recent steps as the page can hold."""
    steps = snapshot.steps[-RECENT_STEPS:]
    while True:
        payload = replace(snapshot, steps=steps).to_json().encode()
        if len(payload) <= CAPACITY:
            return payload
        if not steps:
            raise TelemetryError(
                f"the snapshot of run {snapshot.run_name!r} takes {len(payload)} bytes without its steps; "
                f"a page holds {CAPACITY}"
            )
        steps = steps[(len(steps) + 1) // 2 :]


@dataclass(frozen=True)
class PageReading:
    """What a page said when it was read.

    live            the writer holds its lock and the content is whole
    stale           the writer is gone; ``snapshot`` is the last thing it said, or None
    newer-version   the format is newer than this reader
    torn            a writer that still lives did not finish an update (stopped in the middle of one?)
    unreadable      not a page, truncated, damaged, or not ours

    ``heartbeat_age`` is seconds since the last publication, None when there is none; ``reason`` is empty for
    live pages. ``description`` is None where the writer gave none, or where it is damaged. ``published_at`` is the Unix
    time of ``snapshot``: the same in every reading of one publication.
    """

    state: State
    heartbeat_age: float | None
    snapshot: Snapshot | None
    reason: str
    description: Description | None = None
    published_at: float | None = None


@dataclass(frozen=True)
class Page:
    """A page file in a run directory. ``run_name`` (as the file name spells it) and ``rank`` need no read."""

    path: Path
    run_name: str
    rank: int

    def read(self) -> PageReading:
        """Read the page as it is now. Never raises for what the file holds or lacks."""
        try:
            fd = _open_page(self.path)
        except FileNotFoundError:
            return PageReading("stale", None, None, "the page has been removed")
        except OSError as error:
            return PageReading("unreadable", None, None, error.strerror or str(error))
        try:
            return _read(fd)
        except OSError as error:
            return PageReading("unreadable", None, None, error.strerror or str(error))
        finally:
            os.close(fd)


def find_pages(directory: Path | None = None) -> list[Page]:
    """Pages in ``directory`` (default: ``run_directory()``) by run and rank, without other users' files.

    Raises TelemetryError when the directory is not ours alone.
    """
    directory = run_directory() if directory is None else private_directory(Path(directory))
    pages = [_named(path) for path in directory.glob("*" + SUFFIX) if _is_ours(path)]
    return sorted(pages, key=lambda page: (page.run_name, page.rank, page.path))


def sweep(directory: Path, keep_seconds: float = 0.0) -> list[Path]:
    """Remove pages whose writer is dead and whose last update is over ``keep_seconds`` old; return them.

    Files with names that no writer gives are let alone: the directory may be one that is used for something else, too.
    """
    swept = []
    unfinished_keep = max(keep_seconds, 60.0)  # between open and lock a new page looks dead
    for pattern, keep in (("*" + SUFFIX, keep_seconds), ("*.new", unfinished_keep)):
        for path in directory.glob(pattern):
            if _WRITERS_NAME.fullmatch(path.stem) and _is_ours(path) and _is_dead(path, keep):
                with suppress(OSError):  # gone already, or on a file system that became read-only: it stays
                    path.unlink()
                    swept.append(path)
    return swept


def _is_dead(path: Path, keep_seconds: float) -> bool:
    """Whether the page is without a writer, and its last update over ``keep_seconds`` old."""
    try:
        fd = _open_page(path)
    except OSError:
        return False
    try:
        # Age first: to ask for the lock of a page that is being made would hold up who makes it, and for long if we
        # are stopped just then.
        age = abs(time.time() - os.fstat(fd).st_mtime)  # a clock set back must not keep the dead
        return age > keep_seconds and not _locked_by_another(fd)
    finally:
        os.close(fd)


def _is_ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:
        return False


def _named(path: Path) -> Page:
    # run_name.rank.pid-random.page; a file of another name is listed too, and says why it cannot be read.
    name = as_text(path.name)
    parts = name.removesuffix(SUFFIX).split(".")
    rank = int(parts[1]) if len(parts) == 3 and re.fullmatch("[0-9]{1,9}", parts[1]) else 0
    return Page(path, parts[0] or name, rank)


def _open_page(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(0, "not a regular file")
    return fd


def _read(fd: int) -> PageReading:
    for _ in range(10):
        reading = _read_once(fd)
        if reading.state != "torn" or not _locked_by_another(fd):
            break
        time.sleep(0.001)
    if reading.state in ("live", "torn") and not _locked_by_another(fd):
        reason = "the writer is gone" if reading.state == "live" else "the writer died during an update"
        return replace(reading, state="stale", reason=reason)
    return reading


def _read_once(fd: int) -> PageReading:
    """One attempt, as if the writer lived."""
    first = os.pread(fd, _HEADER.size, 0)
    if len(first) < 12 or not first.startswith(MAGIC):
        return PageReading("unreadable", None, None, "not a telemetry page")
    version = int.from_bytes(first[8:12], "little")
    if version > VERSION:
        reason = f"format {version}; this reader knows up to {VERSION}"
        return PageReading("newer-version", None, None, reason)
    if len(first) < max(_OLDEST_HEADER, min(_size_of(first), _HEADER.size)):
        return PageReading("unreadable", None, None, "truncated")
    header = _Header.unpack(first)
    age = max(0, time.time_ns() - header.heartbeat_ns) / 1e9 if header.heartbeat_ns else None
    if header.header_size < _OLDEST_HEADER or not header.length <= header.capacity <= _SANE_PAYLOAD:
        return PageReading("unreadable", None, None, "the header makes no sense")
    payload = os.pread(fd, header.length, header.header_size)
    if header.sequence % 2 or os.pread(fd, _HEADER.size, 0) != first:
        return PageReading("torn", age, None, "an update was going on for the whole time of reading")
    if len(payload) < header.length:
        return PageReading("unreadable", age, None, "truncated")
    if _checksum(header.heartbeat_ns, payload) != header.crc:
        return PageReading("unreadable", age, None, "the checksum does not match")
    if not payload:
        return PageReading("live", age, None, "")  # created, nothing published yet
    try:
        snapshot = Snapshot.from_json(payload)
    except ValidationError as error:
        return PageReading("unreadable", age, None, f"not a snapshot: {_what_is_wrong(error)}")
    return PageReading("live", age, snapshot, "", _description(fd, header), header.heartbeat_ns / 1e9)


def _what_is_wrong(error: ValidationError) -> str:
    """The first complaint; of very many each would take memory to be told."""
    if error.error_count() > 20:
        return f"{error.error_count()} of its fields are wrong"
    return error.errors(include_url=False, include_input=False)[0]["msg"]


def _description(fd: int, header: _Header) -> Description | None:
    """What never changes, and is therefore read without a look at the sequence number."""
    if not 0 < header.description_length <= LARGEST_DESCRIPTION:
        return None
    raw = os.pread(fd, header.description_length, header.header_size + header.capacity)
    return _described(raw, header.description_crc)


@lru_cache(maxsize=64)
def _described(raw: bytes, crc: int) -> Description | None:
    """``raw`` as a record: the same bytes come with every reading."""
    if zlib.crc32(raw) != crc:
        return None
    try:
        return Description.from_json(raw)
    except ValidationError:
        return None
