"""Swap files: unnamed, private, with reserved space; and the fallbacks on file systems without these features.

The file is made with ``O_TMPFILE``: it has no name, so two jobs in one directory cannot conflict, and the kernel frees
it when the last descriptor closes, also after ``kill -9``. That may take the kernel a moment, so a process that is
restarted at once waits for the space. Its blocks are reserved by ``fallocate(2)`` before the first step, so a full disk
is found at start and not during a run. It is opened with ``O_DIRECT``, so that swapping takes no memory beyond the
budgets. On btrfs it is made NOCOW, because an overwrite would otherwise take new blocks, which nothing has reserved.
Forked children close their copy of the descriptor at once, or a data worker would keep the space alive.

Some file systems lack one of these (NFS, vfat, 9p, FUSE). Each has a fallback, and one warning per path names the
missing features. A file system in memory (tmpfs) is refused, unless it is allowed for tests and demonstrations.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import resource
import secrets
import stat
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tiering._aio import lib
from tiering.config.training import format_size
from tiering.errors import SwapSpaceError
from tiering.storage.arena import PAGE, round_up
from tiering.storage.file_system import direct_alignment, fsync
from tiering.storage.named_files import NamedFile, check_name, link, name_in

log = logging.getLogger(__name__)

# <linux/magic.h>. devtmpfs is a tmpfs.
_OVERLAY = 0x794C7630
_BTRFS = 0x9123683E
_MEMORY_FILE_SYSTEMS = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs"}

# <linux/fs.h>
_GETFLAGS, _SETFLAGS, _NOCOW = 0x80086601, 0x40086602, 0x00800000

IN_TRAINING = "name another nvme_path, or raise host_budget so that less is swapped"
"""The other remedies where space is short."""

PATIENCE_SECONDS = 2.0
"""Where space is short, the wait for it ends after so long without growth."""

LONGEST_WAIT_SECONDS = 30.0

_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOSYS)  # EISDIR: a kernel that does not know the flag
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS)

_OPEN_FILES: weakref.WeakSet[SwapFile] = weakref.WeakSet()


class SwapFile:
    """``nbytes`` of reserved space in ``directory``. ``fd`` is -1 once closed; ``direct`` says that O_DIRECT is in use,
    in multiples of ``alignment``.

    ``missing_features`` describes features that the file system lacks. ``direct=False`` uses the page cache.

    Raises SwapSpaceError if the file cannot be created or the space is too small; then, no file is left.
    """

    def __init__(self, directory: Path, nbytes: int, *, direct: bool = True) -> None:
        self.directory = directory
        self.nbytes = 0
        missing_features: list[str] = []
        self._name: Path | None = None
        self._is_public = False
        # The name is that of a snapshot of another run.
        self._is_adopted = False
        # Descriptors of files that others have replaced.
        self._former: list[int] = []
        self.fd, self.direct, nameless = _open(directory, direct)
        # Before the wait for space: a child that is forked meanwhile closes its copy of the descriptor.
        _OPEN_FILES.add(self)
        try:
            if not nameless:
                missing_features.append(
                    "no unnamed files (O_TMPFILE): a process that is killed while it creates one leaves an empty file"
                    " .tiering-*.swap there"
                )
            # Before the first block: the flag of a file with blocks cannot be changed.
            if not overwrites_in_place(self.fd, directory):
                missing_features.append(
                    "no NOCOW (btrfs refuses it): an overwrite takes new blocks, so a full disk may be detected only"
                    " by a failing write"
                )
            self._reserves = True
            # A device may have larger blocks than the engine's pages. The last one is the file's, too.
            self.alignment = direct_alignment(self.fd) if self.direct else PAGE
            self.resize(nbytes)
            if not self._reserves:
                missing_features.append("no fallocate: a full disk is detected only by a failing write")
            if self.direct and nbytes and not _takes_direct_transfers(self.fd, directory, self.alignment):
                # Before the I/O context gets the descriptor: ``direct`` determines which transfers must be aligned.
                fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~os.O_DIRECT)
                self.direct = False
            if direct and not self.direct:
                missing_features.append("no O_DIRECT: the page cache uses memory beyond the budgets")
        except BaseException:
            self.close()
            raise
        self.missing_features = tuple(missing_features)
        if missing_features:
            log.warning(
                "the file system of nvme_path %s lacks features: %s", directory, "; ".join(missing_features)
            )

    def resize(self, nbytes: int) -> None:
        """Grow or shrink to ``nbytes``, rounded up to ``alignment``.

        Raises SwapSpaceError when there is too little space.
        """
        nbytes = round_up(nbytes, self.alignment)
        if nbytes > self.nbytes:
            self._grow(nbytes)
        elif nbytes < self.nbytes:
            os.ftruncate(self.fd, nbytes)
        self.nbytes = nbytes

    def _grow(self, nbytes: int) -> None:
        needed = nbytes - self.nbytes
        # First: a process that was killed may still hold the space, which the kernel frees a moment after its end.
        if not wait_for_space([self.directory], lambda: needed <= free_bytes(self.directory)):
            raise too_full(self.directory, needed, free_bytes(self.directory))
        code = _fallocate(self.fd, nbytes) if self._reserves else errno.EOPNOTSUPP
        if code in _NO_FALLOCATE:
            self._reserves = False
            try:
                os.ftruncate(self.fd, nbytes)
            except OSError as error:
                code = error.errno or errno.EIO
            else:
                return
        if code:
            raise _refused(self.directory, nbytes, code)

    def named(self, label: str) -> NamedFile:
        """The file with the name, with ``label``, that ``publish`` gives it."""
        if self._name is None:
            self._name = name_in(self.directory, label)
        return NamedFile.of(self._name, self.fd)

    def publish(self) -> None:
        """Give the file its name, if it has none yet; it is on the disk when this returns. Raises SwapSpaceError."""
        assert self._name is not None
        try:
            if not self._is_public:
                link(self.fd, self._name)
                self._is_public = True
            else:
                # The kernel gives a file that had a name no other one.
                check_name(self.fd, self._name)
            # Each time: that of the snapshot before may have failed.
            fsync(self.directory)
            os.fsync(self.fd)
        except OSError as error:
            raise SwapSpaceError(
                f"the swap file {self._name} cannot hold a snapshot: {error.strerror}; see dmesg, save a checkpoint,"
                " and start again"
            ) from error

    @property
    def is_public(self) -> bool:
        """Whether the file has a name."""
        return self._is_public

    def adopt(self, fd: int, path: Path) -> None:
        """Be the file ``fd`` from now on, whose name is ``path``; the space of the former file becomes free."""
        former, self.fd = self.fd, fd
        # The I/O context borrows it until it is closed.
        self._former.append(former)
        self._name, self._is_public, self.nbytes = path, True, os.fstat(fd).st_size
        self._is_adopted = True
        os.ftruncate(former, 0)

    def withdraw(self) -> None:
        """Remove the name, if ``publish`` has given it."""
        if self._is_public and not self._is_adopted and self._name is not None:
            self._name.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the descriptor; the kernel frees the space, unless the file has a name.

        The I/O context must have been closed first.
        """
        while self._former:
            os.close(self._former.pop())
        if self.fd >= 0:
            # In this order: a child that is forked between the two statements closes nothing. In the other order, it
            # could close a descriptor that another thread has opened with the same number.
            fd, self.fd = self.fd, -1
            os.close(fd)


def check_directory(directory: Path, *, allow_memory_file_system: bool = False) -> Path:
    """``directory``, if it can hold swap space. Raises SwapSpaceError with the reason and the remedy."""
    try:
        mode = directory.stat().st_mode
    except FileNotFoundError:
        raise SwapSpaceError(
            f"nvme_path {directory} does not exist; create it (mkdir -p {directory}) or name another"
        ) from None
    except OSError as error:
        raise SwapSpaceError(
            f"nvme_path {directory} cannot be reached: {error.strerror}; change the mode of the directories above it"
            " or name another"
        ) from error
    if not stat.S_ISDIR(mode):
        raise SwapSpaceError(f"nvme_path {directory} is not a directory; name a directory")
    kind = memory_file_system(directory)
    if kind and not allow_memory_file_system:
        raise SwapSpaceError(
            f"nvme_path {directory} is on {kind}, which lives in RAM: state swapped there would use the memory it is"
            " meant to save; name a directory on a disk, or allow it with tiering.io.allow_memory_file_system"
        )
    if os.statvfs(directory).f_flag & os.ST_RDONLY:
        raise SwapSpaceError(
            f"nvme_path {directory} is on a file system that is mounted read-only; remount it or name another directory"
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        raise SwapSpaceError(
            f"nvme_path {directory} is not writable by this user; change its mode or name another"
        )
    return directory


def free_bytes(directory: Path) -> int:
    """Free bytes for an unprivileged user in ``directory``'s file system."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def free_by_file_system(directories: Iterable[Path]) -> dict[int, int]:
    """Free bytes of each file system that holds one of ``directories``, once each, by its device number."""
    return {directory.stat().st_dev: free_bytes(directory) for directory in directories}


def wait_for_space(directories: Sequence[Path], enough: Callable[[], bool]) -> bool:
    """Whether there is ``enough`` free space in ``directories``. Waits shortly for it, and longer while it grows."""
    if enough():
        return True
    start = grown = time.monotonic()
    free = sum(free_by_file_system(directories).values())
    names = ", ".join(map(str, directories))
    log.info(
        "%d bytes are free in %s, which is too little: waiting for space of processes that have just ended",
        free,
        names,
    )
    while not enough():
        now = time.monotonic()
        if now > min(grown + PATIENCE_SECONDS, start + LONGEST_WAIT_SECONDS):
            return False
        time.sleep(0.02)
        # The kernel frees the blocks of a large file little by little: as long as it does, the wait continues.
        before, free = free, sum(free_by_file_system(directories).values())
        grown = now if free > before else grown
    return True


def size_by_file_system(directories: Iterable[Path]) -> dict[int, int]:
    """Bytes of each file system that holds one of ``directories``, used or free, by its device number."""
    stats_of = {directory.stat().st_dev: os.statvfs(directory) for directory in directories}
    return {device: stats.f_blocks * stats.f_frsize for device, stats in stats_of.items()}


def memory_file_system(directory: Path) -> str:
    """The kind of the file system in memory that holds ``directory``; "" for a disk, or if it is unknown.

    The magic number decides, so that no mount table has to be read. An overlay (a container's root) stores written
    files in its upper directory, so the file system of that directory is checked as well; if this mount namespace does
    not contain it, the overlay counts as a disk.
    """
    magic = _magic(directory)
    if magic == _OVERLAY:
        upper = _upper_directory(directory)
        magic = _magic(upper) if upper is not None else 0
    return _MEMORY_FILE_SYSTEMS.get(magic, "")


def overwrites_in_place(fd: int, directory: Path) -> bool:
    """Let writes to an empty file in ``directory`` replace its blocks, on btrfs; whether they do."""
    if _magic(directory) != _BTRFS:
        return True
    try:
        (flags,) = struct.unpack("i", fcntl.ioctl(fd, _GETFLAGS, bytes(4)))
        fcntl.ioctl(fd, _SETFLAGS, struct.pack("i", flags | _NOCOW))
    except OSError as error:
        log.debug("%s: btrfs refuses NOCOW: %s", directory, error)
        return False
    return True


def disk_of(directory: Path) -> str:
    """The disk of ``directory``: its place in /sys, or the number of the file system."""
    number = directory.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    if not block.exists():
        return str(number)
    return str(block.parent if (block / "partition").exists() else block)


def too_full(directory: Path, nbytes: int, available: int, reason: str = "") -> SwapSpaceError:
    """The error: ``nbytes`` more do not fit into ``directory``'s file system, where ``available`` are free."""
    lacking = f"free {nbytes - available} bytes" if nbytes > available else "free some space"
    return SwapSpaceError(
        f"the swap file needs {nbytes} bytes but {directory} has {available} free{reason}; {lacking},"
        f" {IN_TRAINING}"
    )


def _refused(directory: Path, nbytes: int, code: int) -> SwapSpaceError:
    """The error: the kernel did not reserve space that statvfs had reported as free."""
    available = free_bytes(directory)
    if code == errno.ENOSPC:
        return too_full(
            directory, nbytes, available, " (ENOSPC: other processes write to it, or blocks are reserved)"
        )
    reason, remedy = {
        errno.EDQUOT: ("the disk quota does not allow them (EDQUOT)", "raise the quota"),
        errno.EFBIG: (f"a file may not be that large (EFBIG; {_largest_file()})", "raise the limit"),
    }.get(code, (f"{errno.errorcode.get(code, code)}, {os.strerror(code)}", "see dmesg"))
    return SwapSpaceError(
        f"the swap file needs {nbytes} bytes in {directory}, of which {available} are free, but {reason}; {remedy},"
        f" {IN_TRAINING}"
    )


def _largest_file() -> str:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    own = limit != resource.RLIM_INFINITY
    return f"ulimit -f is {format_size(limit)}" if own else "a limit of the file system"


def _open(directory: Path, direct: bool) -> tuple[int, bool, bool]:
    """A private file in ``directory``: (descriptor, whether O_DIRECT is in use, whether it never had a name)."""
    try:
        try:
            # Without a name from the first moment: no crash can leave the file behind, and no other process can open
            # it.
            return *_open_once_or_twice(directory, os.O_TMPFILE, direct), True
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
        return *_open_once_or_twice(directory, os.O_CREAT | os.O_EXCL, direct), False
    except OSError as error:
        remedy = {
            errno.EROFS: " (the file system is mounted read-only); remount it or name another directory",
            errno.ENOSPC: " (no room for an empty file); free space there or name another directory",
            errno.EDQUOT: " (the quota is used up); raise it or name another directory",
        }.get(error.errno or 0, "; check its mode and owner")
        raise SwapSpaceError(f"cannot create a swap file in {directory}: {error.strerror}{remedy}") from error


def _open_once_or_twice(directory: Path, flags: int, direct: bool) -> tuple[int, bool]:
    """With O_DIRECT if ``direct`` and the file system supports it, else without."""
    if direct:
        try:
            return _open_once(directory, flags | os.O_DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return _open_once(directory, flags), False


def _open_once(directory: Path, flags: int) -> int:
    flags |= os.O_RDWR | os.O_CLOEXEC
    if not flags & os.O_CREAT:
        return os.open(directory, flags, 0o600)
    name = directory / f".tiering-{secrets.token_hex(8)}.swap"
    try:
        return os.open(name, flags, 0o600)
    finally:  # also if O_DIRECT is refused: some kernels have created the file before
        with contextlib.suppress(FileNotFoundError):
            name.unlink()


def _fallocate(fd: int, nbytes: int) -> int:
    """The errno of the system call, or 0. glibc's posix_fallocate would fall back to writing zeros."""
    return -int(lib.aio_reserve(fd, nbytes))


def _takes_direct_transfers(fd: int, directory: Path, alignment: int) -> bool:
    """Write and read a block: some file systems accept O_DIRECT and refuse the transfer, or want larger blocks."""
    with mmap.mmap(-1, alignment) as page:
        try:
            # The first block has no owner yet.
            os.pwritev(fd, [page], 0)
            os.preadv(fd, [page], 0)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise _refused(directory, alignment, error.errno or errno.EIO) from error
    return True


def _magic(path: Path) -> int:
    """``f_type`` of statfs(2), the first word of its result; 0 if the call fails."""
    answer = (ctypes.c_long * 32)()
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(path), answer) != 0:
        return 0
    return answer[0] & 0xFFFFFFFF


def _upper_directory(directory: Path) -> Path | None:
    """The ``upperdir`` of the overlay that holds ``directory``."""
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        fields, _, after = line.partition(" - ")
        if fields.split()[2] == number:
            options = after.split()[-1].split(",")
            uppers = [
                option.removeprefix("upperdir=") for option in options if option.startswith("upperdir=")
            ]
            return Path(uppers[0]) if uppers else None
    return None


def _close_in_child() -> None:
    # Each descriptor holds the space of a file without a name, also that of a child which never uses it.
    for file in list(_OPEN_FILES):
        file.close()


os.register_at_fork(after_in_child=_close_in_child)
