"""The status file: one rank writes it, and any process of the same user reads it.

It holds a fixed header, a JSON payload (the snapshot) that each publication replaces, and after the payload's capacity
a second JSON text (the description) that never changes. Any number of readers read it while one writer updates it:

* Sequence lock. The writer makes the sequence number odd, writes the payload, then writes the whole header
  with the next even number. A reader takes no lock: it reads header, payload, header again, and repeats
  this if the number was odd or changed. A CRC32 over heartbeat, length and payload detects corruption that
  the number cannot show.
* No memory mapping. Both sides use pread and pwrite. If somebody truncates a mapped file, or a full tmpfs
  cannot back it, access raises SIGBUS in the middle of training; a short read is an error that a reader can
  report. Four publications a second cost the same either way.
* The lock shows that the writer lives. The writer holds flock(LOCK_EX) until it closes the file or its
  process ends; the kernel then releases the lock. A pid is not valid across containers, and a heartbeat also
  stops in a debugger. A forked child shares the lock's open file description, so it closes its copy at once,
  without unlocking.
* Atomic creation. A status file is created under a name that readers ignore, locked, then renamed. An
  unlocked status file may therefore be removed: its writer is dead. This rule and the first 12 bytes (magic,
  version) hold for every version of the format. Within a version, headers only grow: a reader uses the fields
  that it knows.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import time
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple
from weakref import WeakValueDictionary

from pydantic import ValidationError

from tiering.telemetry.description import Description
from tiering.telemetry.snapshot import Snapshot

MAGIC = b"TIERPAGE"
VERSION = 1
# Bytes of payload. A snapshot with three tiers, four paths and 32 steps takes about 20 KiB, and a curve as much.
CAPACITY = 64 << 10
# Bytes. The description of a typical run takes about 10 KiB.
LARGEST_DESCRIPTION = 256 << 10
# A header with a larger capacity is damaged; readers do not allocate that much.
_MAX_CAPACITY = 4 * CAPACITY

State = Literal["live", "stale", "newer-version", "torn", "unreadable"]


class Header(NamedTuple):
    """The start of a status file. Later versions may add fields after these; these keep their offsets."""

    magic: bytes
    version: int
    header_size: int
    capacity: int
    sequence: int
    heartbeat_ns: int  # CLOCK_REALTIME
    length: int
    crc: int
    description_crc: int
    description_length: int  # bytes at header_size + capacity; 0 without a description

    def pack(self) -> bytes:
        return HEADER.pack(*self)

    @classmethod
    def of(cls, raw: bytes) -> Header:
        """The header of a status file that starts with ``raw``."""
        return cls(*HEADER.unpack_from(raw))


HEADER = struct.Struct("<8sIIQQQQIIQ")
SEQUENCE = struct.Struct("<Q")
SEQUENCE_OFFSET = 24


def as_text(text: str) -> str:
    """``text`` as valid UTF-8: bytes of a file name that are not UTF-8 become "?"."""
    return text.encode("utf-8", "replace").decode()


def checksum(heartbeat_ns: int, payload: bytes) -> int:
    """CRC32 of the content that an update replaces."""
    return zlib.crc32(payload, zlib.crc32(struct.pack("<QQ", heartbeat_ns, len(payload))))


def locked_by_another(fd: int) -> bool:
    """Whether a writer holds the lock of the status file ``fd``. Releases the lock that the test acquires."""
    try:
        # Shared, so that two readers that test at once do not take each other for the writer.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


@dataclass(frozen=True)
class StatusReading:
    """The content of a status file at the time of one read.

    live            the writer holds its lock and the content is complete
    stale           the writer has ended; ``snapshot`` is its last publication, or None. Unless the writer was killed,
                    ``snapshot.ended`` says how the run ended
    newer-version   the format is newer than this reader
    torn            a live writer did not finish an update (it may be stopped in the middle of it)
    unreadable      not a status file, truncated, damaged, or owned by another user

    ``heartbeat_age`` is seconds since the last publication, None before the first; ``reason`` is empty for
    live files. ``description`` is None if the writer gave none, or if it is damaged. ``published_at`` is the Unix
    time of ``snapshot``: equal in all readings of one publication.
    """

    state: State
    heartbeat_age: float | None
    snapshot: Snapshot | None
    reason: str
    description: Description | None = None
    published_at: float | None = None


@dataclass(frozen=True)
class StatusFile:
    """A status file in a run directory. ``run_name`` (as the file name spells it) and ``rank`` come from its name.

    ``owner`` is the uid that must own the file; None allows any.
    """

    path: Path
    run_name: str
    rank: int
    owner: int | None = None

    def read(self) -> StatusReading:
        """Read the file now. Never raises: a missing or damaged file is a state of the reading."""
        try:
            fd = open_status_file(self.path)
        except FileNotFoundError:
            return StatusReading("stale", None, None, "the status file has been removed")
        except OSError as error:
            return StatusReading("unreadable", None, None, error.strerror or str(error))
        try:
            if self.owner is not None and os.fstat(fd).st_uid != self.owner:
                return StatusReading("unreadable", None, None, "owned by another user")
            return _read(fd)
        except OSError as error:
            return StatusReading("unreadable", None, None, error.strerror or str(error))
        finally:
            os.close(fd)


def open_status_file(path: Path) -> int:
    """A descriptor that reads a status file. Never blocks and follows no symbolic link. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(0, "not a regular file")
    return fd


def _read(fd: int) -> StatusReading:
    for _ in range(10):
        reading = _read_once(fd)
        if reading.state != "torn" or not locked_by_another(fd):
            break
        time.sleep(0.001)
    # Tested after the read: of a live file, the writer was alive when this content was complete.
    if reading.state in ("live", "torn") and not locked_by_another(fd):
        reason = "the writer is gone" if reading.state == "live" else "the writer died during an update"
        if reading.snapshot is not None and reading.snapshot.ended is not None:
            reason = reading.snapshot.ended.summary
        return replace(reading, state="stale", reason=reason)
    return reading


def _read_once(fd: int) -> StatusReading:
    """Read once, without a test whether the writer is alive."""
    first = os.pread(fd, HEADER.size, 0)
    if len(first) < 12 or not first.startswith(MAGIC):
        return StatusReading("unreadable", None, None, "not a status file")
    version = int.from_bytes(first[8:12], "little")
    if version > VERSION:
        reason = f"format {version}; this version reads formats up to {VERSION}"
        return StatusReading("newer-version", None, None, reason)
    if len(first) < HEADER.size:
        return StatusReading("unreadable", None, None, "truncated")
    header = Header.of(first)
    age = max(0, time.time_ns() - header.heartbeat_ns) / 1e9 if header.heartbeat_ns else None
    if header.header_size < HEADER.size or not header.length <= header.capacity <= _MAX_CAPACITY:
        return StatusReading("unreadable", None, None, "the header is invalid")
    # Between two reads of the header: if both have the same even number, no update began or ended meanwhile.
    payload = os.pread(fd, header.length, header.header_size)
    if header.sequence % 2 or os.pread(fd, HEADER.size, 0) != first:
        return StatusReading("torn", age, None, "an update was in progress during the whole read")
    if len(payload) < header.length:
        return StatusReading("unreadable", age, None, "truncated")
    if checksum(header.heartbeat_ns, payload) != header.crc:
        return StatusReading("unreadable", age, None, "the checksum does not match")
    if not payload:
        # The file was created, and nothing is published yet.
        return StatusReading("live", age, None, "")
    try:
        snapshot = Snapshot.from_json(payload)
    except ValidationError as error:
        return StatusReading("unreadable", age, None, f"not a valid snapshot: {_problem(error)}")
    return StatusReading("live", age, snapshot, "", _description(fd, header), header.heartbeat_ns / 1e9)


def _problem(error: ValidationError) -> str:
    """The first error. ``error.errors()`` allocates a record for each, so that many errors are only counted."""
    if error.error_count() > 20:
        return f"{error.error_count()} fields are invalid"
    return error.errors(include_url=False, include_input=False)[0]["msg"]


_descriptions: WeakValueDictionary[tuple[int, int, int, int], Description] = WeakValueDictionary()
"""Descriptions that are in use, by file (device, inode), checksum and length."""


def _description(fd: int, header: Header) -> Description | None:
    """The description, read once while it is in use. It never changes, so the sequence number is not compared."""
    if not 0 < header.description_length <= LARGEST_DESCRIPTION:
        return None
    file = os.fstat(fd)
    key = (file.st_dev, file.st_ino, header.description_crc, header.description_length)
    description = _descriptions.get(key)
    if description is None:
        # The writer writes it once, before the file has its name.
        raw = os.pread(fd, header.description_length, header.header_size + header.capacity)
        if zlib.crc32(raw) != header.description_crc:
            return None
        try:
            description = _descriptions[key] = Description.from_json(raw)
        except ValidationError:
            return None
    return description
