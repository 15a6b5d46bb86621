"""Swap files: what a full disk says, and what is lost where something is lacking."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import random
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.tiering.storage.conftest import run_or_skip
from tiering.errors import SwapSpaceError
from tiering.storage import swap_file
from tiering.storage.aio import AioContext, FaultPlan
from tiering.storage.arena import PAGE, Arena
from tiering.storage.slab_file import SlabFile
from tiering.storage.swap_file import SwapFile, free_bytes
from tiering.storage.swap_space import Section, SwapSpace

MIB = 1 << 20
NO_DIRECT = "no O_DIRECT: the page cache uses memory beyond the budgets"
NO_FALLOCATE = "no fallocate: a full disk is detected only by a failing write"
NO_TMPFILE = (
    "no unnamed files (O_TMPFILE): a process that is killed while it creates one leaves an empty file"
    " .tiering-*.swap there"
)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def swap_file_in() -> Iterator[Callable[[Path, int], SwapFile]]:
    with ExitStack() as stack:

        def make(directory: Path, nbytes: int) -> SwapFile:
            swap_file = SwapFile(directory, nbytes)
            stack.callback(swap_file.close)
            return swap_file

        yield make


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def round_trip(directory: Path, nbytes: int, *, direct: bool) -> None:
    """Write and read a swap file through the I/O engine."""
    arena = Arena.map(2 * nbytes, "host")
    content = random.Random(1).randbytes(nbytes)
    with AioContext(engine="threads") as aio:
        sections = {"state": Section(nbytes, (directory,))}
        space = SwapSpace(sections, aio, allow_memory_file_system=True)
        (slab,) = space.slabs
        assert slab.direct is direct
        assert bool(fcntl.fcntl(slab.fd, fcntl.F_GETFL) & os.O_DIRECT) is direct
        assert [file.direct for file in aio.stats()] == [direct]
        extent = space.allocate(nbytes, ("w",), "state")
        out, back = arena.lease(nbytes, "out"), arena.lease(nbytes, "in")
        out.view[:] = content
        space.swap_out(extent, out)
        space.swap_in(extent, back).wait()
        assert bytes(back.view) == content
    space.close()


# Space


def test_a_disk_that_is_too_full(
    swap_file_in: Callable[..., SwapFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SwapSpaceError, match=r"has [0-9]+ free; free [0-9]+ bytes"):
        swap_file_in(tmp_path, 4 * shutil.disk_usage(tmp_path).total)  # for real
    monkeypatch.setattr(swap_file, "free_bytes", lambda _: 10 * PAGE)
    with pytest.raises(SwapSpaceError) as caught:
        swap_file_in(tmp_path, 11 * PAGE)
    assert str(caught.value) == (
        f"[TIER-SPACE] the swap file needs {11 * PAGE} bytes but {tmp_path} has {10 * PAGE} free; free {PAGE} bytes,"
        " name another nvme_path, or raise host_budget so that less is swapped"
    )
    assert swap_file_in(tmp_path, 10 * PAGE).nbytes == 10 * PAGE


def test_a_disk_that_fills_between_asking_and_reserving(
    mounted: Callable[..., Path], swap_file_in: Callable[..., SwapFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """statvfs says that there is enough; the allocation meets the truth, and gives back what it got."""
    disk = mounted("-O", "^has_journal")
    free, descriptors = free_bytes(disk), open_descriptors()
    answers = iter([64 * MIB])
    monkeypatch.setattr(swap_file, "free_bytes", lambda where: next(answers, None) or free_bytes(where))
    with pytest.raises(SwapSpaceError) as caught:
        swap_file_in(disk, 32 * MIB)
    message = str(caught.value)
    assert f"the swap file needs {32 * MIB} bytes but {disk} has " in message
    assert " free (ENOSPC: other processes write to it, or blocks are reserved); free " in message
    assert open_descriptors() == descriptors
    assert list(disk.iterdir()) == [disk / "lost+found"]
    assert free_bytes(disk) == free
    assert swap_file_in(disk, 8 * MIB).nbytes == 8 * MIB


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            errno.EDQUOT,
            "the disk quota does not allow them (EDQUOT); raise the quota, name another nvme_path",
        ),
        (
            errno.EFBIG,
            "a file may not be that large (EFBIG; a limit of the file system); raise the limit, name",
        ),
        (errno.EIO, "EIO, Input/output error; see dmesg, name another nvme_path"),
    ],
)
def test_a_reservation_that_is_refused(
    swap_file_in: Callable[..., SwapFile],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    reason: str,
) -> None:
    monkeypatch.setattr(swap_file, "_fallocate", lambda *_: code)
    descriptors = open_descriptors()
    with pytest.raises(SwapSpaceError) as caught:
        swap_file_in(tmp_path, 3 * PAGE)
    assert f"the swap file needs {3 * PAGE} bytes in {tmp_path}, of which " in str(caught.value)
    assert f" are free, but {reason}" in str(caught.value)
    assert "raise host_budget so that less is swapped" in str(caught.value)
    assert open_descriptors() == descriptors
    assert list(tmp_path.iterdir()) == []


def test_a_real_quota(mounted: Callable[..., Path]) -> None:
    disk = mounted(mkfs=("mkfs.btrfs", "-q"), nbytes=200 * MIB)
    home = disk / "home"
    run_or_skip("btrfs", "quota", "enable", str(disk))
    run_or_skip("btrfs", "subvolume", "create", str(home))
    run_or_skip("btrfs", "qgroup", "limit", "20M", str(home))
    assert free_bytes(home) > 40 * MIB
    with pytest.raises(SwapSpaceError) as caught:
        SwapFile(home, 40 * MIB)
    assert "but the disk quota does not allow them (EDQUOT); raise the quota" in str(caught.value)
    assert list(home.iterdir()) == []
    swap_file = SwapFile(home, 10 * MIB)
    assert swap_file.missing_features == ()
    assert os.fstat(swap_file.fd).st_blocks * 512 >= 10 * MIB
    swap_file.close()


def test_the_limit_of_a_file(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with AioContext(engine="threads") as aio:
        before = open_descriptors()
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 * MIB, limits[1]))
        try:
            with pytest.raises(SwapSpaceError) as caught:
                SlabFile(tmp_path, 65 * MIB, aio)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert open_descriptors() == before
    assert "a file may not be that large (EFBIG; ulimit -f is 64.00 MiB); raise the limit" in str(
        caught.value
    )


def test_resizing(swap_file_in: Callable[..., SwapFile], tmp_path: Path) -> None:
    swap_file = swap_file_in(tmp_path, 3 * MIB)
    for nbytes in (MIB, 5 * MIB, 0, PAGE):
        swap_file.resize(nbytes)
        status = os.fstat(swap_file.fd)
        assert swap_file.nbytes == status.st_size == nbytes
        assert nbytes <= status.st_blocks * 512 <= nbytes + MIB


# What a file system lacks


def refuse(monkeypatch: pytest.MonkeyPatch, refused: Callable[[int], int]) -> None:
    """Make os.open for writing fail with the errno that ``refused`` gives for its flags, unless it is 0."""
    real = os.open

    def fake(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        code = refused(flags) if flags & os.O_RDWR else 0
        if code:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", fake)


def tmpfile(flags: int) -> bool:
    return flags & os.O_TMPFILE == os.O_TMPFILE


def test_a_whole_file_system_gives_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    round_trip(tmp_path, 3 * PAGE, direct=True)
    assert warnings(caplog) == []


def test_memory_may_be_allowed() -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("this machine has no /dev/shm")
    round_trip(shm, 4 * PAGE, direct=True)


def test_without_o_direct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse(monkeypatch, lambda flags: errno.EINVAL if flags & os.O_DIRECT else 0)
    round_trip(tmp_path, 4 * PAGE, direct=False)
    assert warnings(caplog) == [f"the file system of nvme_path {tmp_path} lacks features: {NO_DIRECT}"]


@pytest.mark.parametrize("refused", ["pwritev", "preadv"])
def test_o_direct_that_only_the_transfer_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refused: str
) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, refused, fails)
    round_trip(tmp_path, 4 * PAGE, direct=False)
    assert warnings(caplog) == [f"the file system of nvme_path {tmp_path} lacks features: {NO_DIRECT}"]


@pytest.mark.parametrize("refused", [0, errno.EINVAL, errno.ENOTTY])
def test_a_swap_file_on_btrfs_overwrites_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refused: int
) -> None:
    """The flags that the file has stay, and the file has no blocks yet: btrfs would ignore the flag."""
    get_flags, set_flags, secure_deletion, nocow = 0x80086601, 0x40086602, 0x1, 0x800000
    asked: list[tuple[int, int, int]] = []

    def ioctl(fd: int, request: int, argument: bytes) -> bytes:
        asked.append((request, int.from_bytes(argument, sys.byteorder), os.fstat(fd).st_size))
        if request == set_flags and refused:
            raise OSError(refused, os.strerror(refused))
        return secure_deletion.to_bytes(4, sys.byteorder)

    monkeypatch.setattr(swap_file, "_magic", lambda _: 0x9123683E)
    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    made = SwapFile(tmp_path, 4 * PAGE)
    made.close()
    assert asked == [(get_flags, 0, 0), (set_flags, secure_deletion | nocow, 0)]
    assert [feature.split(":")[0] for feature in made.missing_features] == (
        ["no NOCOW (btrfs refuses it)"] if refused else []
    )
    assert len(warnings(caplog)) == bool(refused)


def test_the_flag_of_btrfs_is_not_asked_for_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "ioctl", None)
    SwapFile(tmp_path, PAGE).close()


def test_a_device_with_larger_blocks_is_used_directly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here the fault backend refuses what such a device would refuse; the file has whole blocks."""
    monkeypatch.setattr(swap_file, "direct_alignment", lambda _: 4 * PAGE)
    probed: list[int] = []
    write = os.pwritev
    monkeypatch.setattr(
        os, "pwritev", lambda fd, pages, at: probed.append(len(pages[0])) or write(fd, pages, at)
    )
    arena = Arena.map(14 * PAGE, "host")
    with AioContext(fault=FaultPlan((), 4 * PAGE)) as aio:
        space = SwapSpace({"state": Section(5 * PAGE, (tmp_path,))}, aio)
        (slab,) = space.slabs
        assert (slab.direct, slab.capacity, probed) == (True, 8 * PAGE, [4 * PAGE])
        space.grow("state", 4 * PAGE)
        assert (slab.capacity, os.fstat(slab.fd).st_size) == (12 * PAGE, 12 * PAGE)
        extents = [space.allocate(nbytes * PAGE, ("w",), "state") for nbytes in (3, 2, 4)]
        leases = [arena.lease(extent.nbytes, "out") for extent in extents]
        for value, (extent, lease) in enumerate(zip(extents, leases, strict=True)):
            lease.view[:] = bytes([value + 1]) * lease.nbytes
            space.swap_out(extent, lease)
        for value, extent in enumerate(extents):
            space.settle(extent)
            leases[value].view[:] = bytes(extent.nbytes)
            space.swap_in(extent, leases[value]).wait()
            assert bytes(leases[value].view) == bytes([value + 1]) * extent.nbytes
    space.close()
    assert warnings(caplog) == []


def test_the_probing_page_finds_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", fails)
    with pytest.raises(SwapSpaceError, match="ENOSPC"):
        SwapFile(tmp_path, PAGE)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_fallocate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    monkeypatch.setattr(swap_file, "_fallocate", lambda *_: code)
    round_trip(tmp_path, 4 * PAGE, direct=True)
    assert warnings(caplog) == [f"the file system of nvme_path {tmp_path} lacks features: {NO_FALLOCATE}"]


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EISDIR, errno.ENOSYS])
def test_without_nameless_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    names: list[Path] = []
    real = os.open

    def note_open(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if tmpfile(flags):
            raise OSError(code, os.strerror(code))
        fd = real(path, flags, *rest, **options)
        if flags & os.O_CREAT:
            names.append(path)
            assert flags & os.O_EXCL and rest == (0o600,)
        return fd

    monkeypatch.setattr(os, "open", note_open)
    for _ in range(2):
        round_trip(tmp_path, 4 * PAGE, direct=True)
    assert len(set(names)) == 2
    assert all(name.parent == tmp_path and name.match(".tiering-*.swap") for name in names)
    assert list(tmp_path.iterdir()) == []
    message = f"the file system of nvme_path {tmp_path} lacks features: {NO_TMPFILE}"
    assert warnings(caplog) == [message, message]


def test_without_anything_there_is_one_warning_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """O_DIRECT is refused as by kernels that have made the file by then."""
    real = os.open

    def fake(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if tmpfile(flags):
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        fd = real(path, flags & ~os.O_DIRECT, *rest, **options)
        if flags & os.O_DIRECT:
            os.close(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return fd

    monkeypatch.setattr(os, "open", fake)
    monkeypatch.setattr(swap_file, "_fallocate", lambda *_: errno.EOPNOTSUPP)
    round_trip(tmp_path, 4 * PAGE, direct=False)
    assert warnings(caplog) == [
        f"the file system of nvme_path {tmp_path} lacks features: {NO_TMPFILE}; {NO_FALLOCATE}; {NO_DIRECT}"
    ]
    assert list(tmp_path.iterdir()) == []


def test_ext2_has_no_fallocate(mounted: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    """A real file system that cannot reserve space."""
    disk = mounted("-t", "ext2")
    round_trip(disk, 2 * MIB, direct=True)
    assert warnings(caplog) == [f"the file system of nvme_path {disk} lacks features: {NO_FALLOCATE}"]
    with pytest.raises(SwapSpaceError, match=r"has [0-9]+ free; free [0-9]+ bytes"):
        SwapFile(disk, 20 * MIB)
    assert list(disk.iterdir()) == [disk / "lost+found"]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.EROFS, r"mounted read-only\); remount it or name another directory"),
        (errno.EACCES, r"Permission denied; check its mode and owner"),
        (errno.ENOSPC, r"no room for an empty file\); free space there"),
    ],
)
def test_a_file_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, message: str
) -> None:
    refuse(monkeypatch, lambda flags: code)
    with pytest.raises(SwapSpaceError, match=message):
        SwapFile(tmp_path, PAGE)
