"""Counters that outlive the process that counted them: one small page per rank, in a per-user run directory.

A page is a file: a fixed header, then a JSON payload. Any number of readers look at it while one writer updates
it, and neither side can hurt the other:

* **Sequence lock.** The writer makes the sequence number odd, writes the payload, then writes the whole header
  with the next even number. A reader takes no lock: it reads header, payload, header again, and tries once more
  when the number was odd or moved. A CRC32 over heartbeat, length and payload catches what the number cannot.
* **No mapping on either side.** Both use pread and pwrite on the page cache. A mapped page that someone truncates,
  or that a full tmpfs cannot back, is a SIGBUS in the middle of training; a short read is a state that a reader can
  name. Four publications a second cost the same either way.
* **Alive means locked.** The writer holds flock(LOCK_EX) for its life; the kernel drops it however that life ends.
  A pid says nothing across containers, and a heartbeat stops for a debugger too. A forked child shares the lock's
  open file description, so it closes its copy at once, without unlocking.
* **Appearing whole.** A page is created under a name that no reader looks at, locked, then renamed. Whoever finds an
  unlocked page may therefore remove it: its writer is dead. This rule and the first 12 bytes (magic, version) hold
  for every version of the format.

Directories are 0700 and pages 0600; what another user owns is refused or ignored.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import re
import secrets
import stat
import struct
import tempfile
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

from pydantic import ConfigDict, TypeAdapter, ValidationError

from tiering.errors import TieringError

__all__ = [
    "DirectionStatus",
    "Page",
    "PageReading",
    "PageWriter",
    "PathStatus",
    "Publisher",
    "Snapshot",
    "StepRecord",
    "TelemetryError",
    "TierStatus",
    "find_pages",
    "run_directory",
    "sweep",
    "with_rates",
]

log = logging.getLogger(__name__)

MAGIC = b"TIERPAGE"
VERSION = 1
CAPACITY = 64 << 10  # bytes of payload; a page of three tiers, four paths and 32 steps takes about 10 KiB
SUFFIX = ".page"
RECENT_STEPS = 32

Phase = Literal["start", "forward", "backward", "step", "idle"]
State = Literal["live", "stale", "newer-version", "torn", "unreadable"]


class TelemetryError(TieringError):
    """The run directory cannot hold pages, or a page cannot be written."""

    code = "TIER-TELEMETRY"


# --- What a page says ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TierStatus:
    """One tier of one rank, in bytes. ``capacity`` is what the machine has, ``budget`` what the plan may use."""

    name: Literal["device", "host", "nvme"]
    budget: int
    capacity: int
    used: int
    peak: int
    by_kind: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class DirectionStatus:
    """Reads or writes of one path since the start. Rates are bytes per second of wall time and of busy time."""

    bytes: int = 0
    ops: int = 0
    retries: int = 0
    errors: int = 0
    in_flight: int = 0
    busy_seconds: float = 0.0
    bytes_per_second: float = 0.0  # over the publisher's last window
    average_bytes_per_second: float = 0.0  # over the time with at least one transfer in flight


@dataclass(frozen=True)
class PathStatus:
    """One swap path: its I/O engine, whether it bypasses the page cache, and both directions."""

    path: str
    engine: str
    direct: bool
    read: DirectionStatus = field(default_factory=DirectionStatus)
    written: DirectionStatus = field(default_factory=DirectionStatus)


@dataclass(frozen=True)
class StepRecord:
    """One finished optimizer step: seconds in all and by phase, seconds stalled, bytes moved over NVMe."""

    step: int
    seconds: float
    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0
    stall: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0


@dataclass(frozen=True)
class Snapshot:
    """Everything one rank publishes. Counters are cumulative; ``started_at`` is Unix time in seconds.

    ``stalls`` maps a cause to the seconds that compute waited for it; ``steps`` holds the most recent, oldest first.
    """

    run_name: str
    rank: int
    world_size: int
    pid: int
    started_at: float
    step: int = 0
    phase: Phase = "start"
    loss: float | None = None
    tiers: list[TierStatus] = field(default_factory=list)
    io: list[PathStatus] = field(default_factory=list)
    stalls: dict[str, float] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)

    # A diverged loss is worth seeing: NaN travels as NaN, not as null.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_inf_nan="constants")

    def to_json(self) -> str:
        """The snapshot as JSON text; infinities and NaN are written as the bare constants, as Python does."""
        return _SNAPSHOT.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Snapshot:
        """Inverse of ``to_json``. Fields this version does not know are dropped. Raises ValueError when it cannot."""
        return _SNAPSHOT.validate_json(text)


_SNAPSHOT = TypeAdapter(Snapshot)


def with_rates(current: Snapshot, previous: Snapshot | None, seconds: float) -> Snapshot:
    """``current`` with its bandwidths filled in from the counters of ``previous``, taken ``seconds`` earlier.

    A path that ``previous`` lacks, a counter that went back (the engine was rebuilt) or no elapsed time gives a rate
    of zero; the average over busy time needs no second sample.
    """
    before = {path.path: path for path in previous.io} if previous is not None else {}

    def rated(now: DirectionStatus, then: DirectionStatus | None) -> DirectionStatus:
        moved = max(0, now.bytes - then.bytes) if then is not None else 0
        return replace(
            now,
            bytes_per_second=moved / seconds if seconds > 0 else 0.0,
            average_bytes_per_second=now.bytes / now.busy_seconds if now.busy_seconds > 0 else 0.0,
        )

    def path_rated(now: PathStatus) -> PathStatus:
        then = before.get(now.path)
        return replace(
            now,
            read=rated(now.read, then.read if then else None),
            written=rated(now.written, then.written if then else None),
        )

    return replace(current, io=[path_rated(path) for path in current.io])


# --- Where pages live ------------------------------------------------------------------------------------


def run_directory() -> Path:
    """The per-user directory of pages, created if missing.

    It is ``$TIERING_RUN_DIR``, else ``$XDG_RUNTIME_DIR/tiering``, else ``tiering-<uid>`` in the temporary directory.
    Raises TelemetryError when it is not ours alone.
    """
    return _private_directory(_default_directory(os.environ))


def _default_directory(environ: Mapping[str, str]) -> Path:
    if chosen := environ.get("TIERING_RUN_DIR"):
        return Path(chosen)
    runtime = environ.get("XDG_RUNTIME_DIR")
    # After su or sudo the variable still names the other user's directory, which may vanish when that user logs out.
    if runtime and os.path.isdir(runtime) and os.stat(runtime).st_uid == os.geteuid():
        return Path(runtime) / "tiering"
    return Path(tempfile.gettempdir()) / f"tiering-{os.geteuid()}"


def _private_directory(directory: Path) -> Path:
    """``directory``, created 0700 if missing. Raises TelemetryError when others could plant or read pages in it."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise TelemetryError(
            f"run directory {directory} cannot be used: {error.strerror}; set TIERING_RUN_DIR to one that can"
        ) from error
    wrong = None
    if not stat.S_ISDIR(status.st_mode):
        wrong = "is a symbolic link"
    elif status.st_uid != os.geteuid():
        wrong = f"is owned by user {status.st_uid}, not {os.geteuid()}"
    elif status.st_mode & 0o022:
        wrong = f"is writable by others (mode {stat.S_IMODE(status.st_mode):04o})"
    if wrong:
        raise TelemetryError(
            f"run directory {directory} {wrong}; "
            "chmod 700 it, or set TIERING_RUN_DIR to a directory of your own"
        )
    return directory


# --- The format ------------------------------------------------------------------------------------------


class _Header(NamedTuple):
    magic: bytes
    version: int
    header_size: int
    capacity: int
    sequence: int
    heartbeat_ns: int  # CLOCK_REALTIME
    length: int
    crc: int

    def pack(self) -> bytes:
        return _HEADER.pack(*self)


_HEADER = struct.Struct("<8sIIQQQQI4x")
_SEQUENCE = struct.Struct("<Q")
_SEQUENCE_OFFSET = 24
_SANE_PAYLOAD = 16 << 20  # a header that promises more than this is garbage


def _checksum(heartbeat_ns: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(struct.pack("<QQ", heartbeat_ns, len(payload))))


def _locked_by_another(fd: int) -> bool:
    """Whether a writer holds the page open as ``fd``; the shared lock taken to find out is given back at once."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


# --- Writing ---------------------------------------------------------------------------------------------

_inherited: weakref.WeakSet[PageWriter | Publisher] = weakref.WeakSet()


class PageWriter:
    """One rank's page. Creating it sweeps the pages of dead writers; closing it removes its own.

    ``publish`` may be called from any thread. In a forked child the writer is closed and publishes nothing.
    """

    path: Path

    def __init__(
        self, run_name: str, rank: int = 0, world_size: int = 1, directory: Path | None = None
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is outside a world of {world_size}")
        directory = run_directory() if directory is None else _private_directory(Path(directory))
        sweep(directory)
        plain = re.sub(r"[^A-Za-z0-9_-]", "_", run_name)[:80] or "run"
        name = f"{plain}.{rank}.{os.getpid()}-{secrets.token_hex(4)}"
        self.path = directory / (name + SUFFIX)
        self._lock = threading.Lock()
        self._sequence = 0
        self._fd = self._create(directory / (name + ".new"))
        _inherited.add(self)

    def _create(self, unfinished: Path) -> int:
        fd = -1
        try:
            fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(fd, 0, _HEADER.size + CAPACITY)  # a full disk shows here, not during training
            os.pwrite(fd, self._header(0, b"").pack(), 0)
            os.rename(unfinished, self.path)
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
        crc = _checksum(heartbeat_ns, payload)
        return _Header(
            MAGIC, VERSION, _HEADER.size, CAPACITY, self._sequence, heartbeat_ns, len(payload), crc
        )

    def publish(self, snapshot: Snapshot) -> None:
        """Replace the page's content.

        Raises TelemetryError when the snapshot does not fit, OSError when the file system refuses, ValueError after
        ``close``.
        """
        payload = _fitted(snapshot)
        with self._lock:
            if self._fd == _ABANDONED:
                return
            if self._fd < 0:
                raise ValueError(f"publish on the closed page {self.path}")
            self._sequence += 1
            os.pwrite(self._fd, _SEQUENCE.pack(self._sequence), _SEQUENCE_OFFSET)
            os.pwrite(self._fd, payload, _HEADER.size)
            self._sequence += 1
            os.pwrite(self._fd, self._header(time.time_ns(), payload).pack(), 0)

    def close(self) -> None:
        """Remove the page and let go of its lock. Idempotent."""
        with self._lock:
            if self._fd < 0:
                return
            self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = _CLOSED

    def _abandon(self) -> None:
        """In a forked child: drop the shared description, leave page and lock to the parent."""
        self._lock = threading.Lock()  # the fork may have happened while another thread held the old one
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = _ABANDONED


_CLOSED, _ABANDONED = -1, -2


def _abandon_inherited() -> None:
    for one in list(_inherited):
        one._abandon()


os.register_at_fork(after_in_child=_abandon_inherited)


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


class Publisher:
    """Publishes what ``source`` returns, every ``interval`` seconds, from a daemon thread. Owns ``writer``.

    Watching must never stop training: whatever ``source`` or the page raises is logged once and then ignored.
    """

    def __init__(self, writer: PageWriter, source: Callable[[], Snapshot], interval: float = 0.25) -> None:
        if interval <= 0:
            raise ValueError(f"interval must be positive seconds, not {interval}")
        self._writer = writer
        self._source = source
        self._interval = interval
        self._lock = threading.Lock()
        self._baseline: Snapshot | None = None
        self._baseline_at = 0.0
        self._complained = False
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        _inherited.add(self)

    def start(self) -> None:
        """Publish once, then keep publishing until ``close`` or the end of the interpreter."""
        if self._thread is not None or self._closing.is_set():
            raise ValueError("this publisher was started before; make another one")
        self.publish_now()
        self._thread = threading.Thread(target=self._run, name="tiering-telemetry", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def publish_now(self) -> None:
        """Publish at once, from the calling thread. Never raises."""
        try:
            # Not under our lock: a source that waits for a lock of the caller's would deadlock against the thread.
            taken_at = time.monotonic()
            raw = self._source()
            with self._lock:
                if not self._closing.is_set():
                    self._publish(raw, taken_at)
        except Exception:
            if not self._complained:
                log.exception("telemetry of %s is out of date from now on", self._writer.path)
            self._complained = True

    def _publish(self, raw: Snapshot, taken_at: float) -> None:
        elapsed = taken_at - self._baseline_at
        if self._baseline is not None and elapsed < 0:
            return  # another thread published a later sample meanwhile
        self._writer.publish(with_rates(raw, self._baseline, elapsed))
        # A call soon after another keeps the older baseline: a rate over a millisecond says nothing.
        if self._baseline is None or elapsed >= self._interval / 2:
            self._baseline, self._baseline_at = raw, taken_at

    def _run(self) -> None:
        while not self._closing.wait(self._interval):
            self.publish_now()

    def close(self) -> None:
        """Stop the thread and remove the page. Idempotent; safe in a forked child, and from ``source`` itself."""
        self._closing.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            # A source that waits for a lock of the caller's must not hang the exit; the thread is a daemon.
            thread.join(timeout=2.0)
        with self._lock:
            self._writer.close()
        atexit.unregister(self.close)

    def _abandon(self) -> None:
        """In a forked child: there is no thread, and the locks may have been held by one."""
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._closing.set()
        self._thread = None


# --- Reading ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PageReading:
    """What a page said when it was read.

    live            the writer holds its lock and the content is whole
    stale           the writer is gone; ``snapshot`` is the last thing it said, or None
    newer-version   the format is newer than this reader
    torn            a writer that still lives did not finish an update (stopped in the middle of one?)
    unreadable      not a page, truncated, damaged, or not ours

    ``heartbeat_age`` is seconds since the last publication, None when there is none; ``reason`` is empty for live.
    """

    state: State
    heartbeat_age: float | None
    snapshot: Snapshot | None
    reason: str


@dataclass(frozen=True)
class Page:
    """A page file found in a run directory. ``run_name`` (as spelled in the file name) and ``rank`` need no read."""

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
    """Pages in ``directory`` (default: ``run_directory()``), by run and rank; other users' files are left out.

    Raises TelemetryError when the directory is not ours alone.
    """
    directory = run_directory() if directory is None else _private_directory(Path(directory))
    pages = [_named(path) for path in directory.glob("*" + SUFFIX) if _is_ours(path)]
    return sorted(pages, key=lambda page: (page.run_name, page.rank, page.path))


def sweep(directory: Path, keep_seconds: float = 0.0) -> list[Path]:
    """Remove pages whose writer is dead and whose last update is older than ``keep_seconds``; return what went."""
    swept = []
    unfinished_keep = max(keep_seconds, 60.0)  # between open and lock a new page looks dead
    for pattern, keep in (("*" + SUFFIX, keep_seconds), ("*.new", unfinished_keep)):
        for path in directory.glob(pattern):
            if _is_ours(path) and _dead_for(path) > keep:
                path.unlink(missing_ok=True)
                swept.append(path)
    return swept


def _dead_for(path: Path) -> float:
    """Seconds since the last update of a page without a writer; -1 when it has one or is gone."""
    try:
        fd = _open_page(path)
    except OSError:
        return -1.0
    try:
        return -1.0 if _locked_by_another(fd) else max(0.0, time.time() - os.fstat(fd).st_mtime)
    finally:
        os.close(fd)


def _is_ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:
        return False


def _named(path: Path) -> Page:
    # run_name.rank.pid-random.page; a file of any other name is listed too, and will say why it cannot be read.
    parts = path.name.removesuffix(SUFFIX).split(".")
    rank = int(parts[1]) if len(parts) == 3 and parts[1].isascii() and parts[1].isdigit() else 0
    return Page(path, parts[0] or path.name, rank)


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
    if len(first) < _HEADER.size:
        return PageReading("unreadable", None, None, "truncated")
    header = _Header(*_HEADER.unpack(first))
    age = max(0, time.time_ns() - header.heartbeat_ns) / 1e9 if header.heartbeat_ns else None
    if header.header_size < _HEADER.size or not header.length <= header.capacity <= _SANE_PAYLOAD:
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
        return PageReading("live", age, Snapshot.from_json(payload), "")
    except ValidationError as error:
        return PageReading("unreadable", age, None, f"not a snapshot: {error.errors()[0]['msg']}")
