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
CAPACITY = 64 << 10  # bytes of payload; one of three tiers, four paths and 32 steps takes about 20 KiB
LARGEST_DESCRIPTION = 256 << 10  # bytes; that of a usual run takes about 10 KiB
# A header that promises more than this is garbage, and would cost its readers much.
_SANE_PAYLOAD = 4 * CAPACITY

State = Literal["live", "stale", "newer-version", "torn", "unreadable"]


class Header(NamedTuple):
    """What a page begins with. Later versions may add fields; what they were before stays where it is."""

    magic: bytes
    version: int
    header_size: int
    capacity: int
    sequence: int
    heartbeat_ns: int  # CLOCK_REALTIME
    length: int
    crc: int
    description_crc: int
    description_length: int  # bytes at header_size + capacity; 0 where there is none

    def pack(self) -> bytes:
        return HEADER.pack(*self)

    @classmethod
    def of(cls, raw: bytes) -> Header:
        """That of a page which begins with ``raw``."""
        return cls(*HEADER.unpack_from(raw))


HEADER = struct.Struct("<8sIIQQQQIIQ")
SEQUENCE = struct.Struct("<Q")
SEQUENCE_OFFSET = 24


def as_text(text: str) -> str:
    """``text`` as a page can hold it: bytes of a file name that are no characters are "?"."""
    return text.encode("utf-8", "replace").decode()


def checksum(heartbeat_ns: int, payload: bytes) -> int:
    """Of what an update replaces."""
    return zlib.crc32(payload, zlib.crc32(struct.pack("<QQ", heartbeat_ns, len(payload))))


def locked_by_another(fd: int) -> bool:
    """Whether a writer holds the page open as ``fd``; the lock taken to find out is given back at once."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


@dataclass(frozen=True)
class StatusReading:
    """What a page said when it was read.

    live            the writer holds its lock and the content is whole
    stale           the writer is gone; ``snapshot`` is the last thing it said, or None. One that was not killed has
                    said how the run ended: ``snapshot.ended``
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
class StatusFile:
    """A page file in a run directory. ``run_name`` (as the file name spells it) and ``rank`` need no read."""

    path: Path
    run_name: str
    rank: int

    def read(self) -> StatusReading:
        """Read the page as it is now. Never raises for what the file holds or lacks."""
        try:
            fd = open_status_file(self.path)
        except FileNotFoundError:
            return StatusReading("stale", None, None, "the page has been removed")
        except OSError as error:
            return StatusReading("unreadable", None, None, error.strerror or str(error))
        try:
            return _read(fd)
        except OSError as error:
            return StatusReading("unreadable", None, None, error.strerror or str(error))
        finally:
            os.close(fd)


def open_status_file(path: Path) -> int:
    """A descriptor to read a page by. Waits for nothing, and follows no link. Raises OSError."""
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
    if reading.state in ("live", "torn") and not locked_by_another(fd):
        reason = "the writer is gone" if reading.state == "live" else "the writer died during an update"
        if reading.snapshot is not None and reading.snapshot.ended is not None:
            reason = reading.snapshot.ended.words
        return replace(reading, state="stale", reason=reason)
    return reading


def _read_once(fd: int) -> StatusReading:
    """One attempt, as if the writer lived."""
    first = os.pread(fd, HEADER.size, 0)
    if len(first) < 12 or not first.startswith(MAGIC):
        return StatusReading("unreadable", None, None, "not a telemetry page")
    version = int.from_bytes(first[8:12], "little")
    if version > VERSION:
        reason = f"format {version}; this reader knows up to {VERSION}"
        return StatusReading("newer-version", None, None, reason)
    if len(first) < HEADER.size:
        return StatusReading("unreadable", None, None, "truncated")
    header = Header.of(first)
    age = max(0, time.time_ns() - header.heartbeat_ns) / 1e9 if header.heartbeat_ns else None
    if header.header_size < HEADER.size or not header.length <= header.capacity <= _SANE_PAYLOAD:
        return StatusReading("unreadable", None, None, "the header makes no sense")
    payload = os.pread(fd, header.length, header.header_size)
    if header.sequence % 2 or os.pread(fd, HEADER.size, 0) != first:
        return StatusReading("torn", age, None, "an update was going on for the whole time of reading")
    if len(payload) < header.length:
        return StatusReading("unreadable", age, None, "truncated")
    if checksum(header.heartbeat_ns, payload) != header.crc:
        return StatusReading("unreadable", age, None, "the checksum does not match")
    if not payload:
        return StatusReading("live", age, None, "")  # created, nothing published yet
    try:
        snapshot = Snapshot.from_json(payload)
    except ValidationError as error:
        return StatusReading("unreadable", age, None, f"not a snapshot: {_what_is_wrong(error)}")
    return StatusReading("live", age, snapshot, "", _description(fd, header), header.heartbeat_ns / 1e9)


def _what_is_wrong(error: ValidationError) -> str:
    """The first complaint; of very many each would take memory to be told."""
    if error.error_count() > 20:
        return f"{error.error_count()} of its fields are wrong"
    return error.errors(include_url=False, include_input=False)[0]["msg"]


_descriptions: WeakValueDictionary[tuple[int, int, int, int], Description] = WeakValueDictionary()
"""Those that somebody still has, by file, checksum and length."""


def _description(fd: int, header: Header) -> Description | None:
    """What never changes: it is read once for as long as anybody has it, and without a look at the sequence number."""
    if not 0 < header.description_length <= LARGEST_DESCRIPTION:
        return None
    file = os.fstat(fd)
    key = (file.st_dev, file.st_ino, header.description_crc, header.description_length)
    description = _descriptions.get(key)
    if description is None:
        raw = os.pread(fd, header.description_length, header.header_size + header.capacity)
        if zlib.crc32(raw) != header.description_crc:
            return None
        try:
            description = _descriptions[key] = Description.from_json(raw)
        except ValidationError:
            return None
    return description
