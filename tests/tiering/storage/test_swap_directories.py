"""Which directories can hold swap space, and what they are on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tiering.errors import SwapSpaceError
from tiering.storage.aio import AioContext
from tiering.storage.arena import PAGE
from tiering.storage.slab_file import SlabFile
from tiering.storage.swap_file import check_directory, disk_of, memory_file_system


@contextmanager
def unprivileged() -> Iterator[None]:
    """Root may do everything: be nobody for a moment."""
    if os.getuid() != 0:
        yield
        return
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that others can reach."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_a_missing_directory(tmp_path: Path) -> None:
    missing = tmp_path / "swap"
    with pytest.raises(SwapSpaceError) as caught:
        check_directory(missing)
    assert str(caught.value) == (
        f"[TIER-SPACE] nvme_path {missing} does not exist; create it (mkdir -p {missing}) or name another"
    )
    assert not missing.exists()


@pytest.mark.parametrize("below", [".", "swap"])
def test_a_file_is_no_directory(tmp_path: Path, below: str) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(SwapSpaceError, match=r"is not a directory|cannot be reached: Not a directory"):
        check_directory(file / below)


def test_a_directory_that_this_user_may_not_write(public: Path) -> None:
    (public / "swap").mkdir(mode=0o555)
    with unprivileged(), pytest.raises(SwapSpaceError, match="not writable by this user; change its mode"):
        check_directory(public / "swap")


def test_a_directory_that_this_user_cannot_reach(public: Path) -> None:
    (public / "closed").mkdir()
    (public / "closed" / "swap").mkdir()
    (public / "closed").chmod(0)
    with unprivileged(), pytest.raises(SwapSpaceError, match="cannot be reached: Permission denied; change"):
        check_directory(public / "closed" / "swap")


def print_unshared(set_up: str, program: str, directory: Path) -> str:
    """What ``program`` prints, run with ``directory`` in mounts of its own, which the shell script ``set_up`` makes."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed (Debian: package util-linux)")
    script = f'{set_up} || exit 77; exec "$@" "$0"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, str(directory), sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"mounts of its own are not allowed here: {done.stderr.strip()}")
    assert done.stderr == ""
    return done.stdout


READ_ONLY = """
import sys
from pathlib import Path
from tiering.errors import SwapSpaceError
from tiering.storage.swap_file import check_directory
try:
    check_directory(Path(sys.argv[1]))
except SwapSpaceError as error:
    print(error)
"""


def test_a_read_only_file_system(tmp_path: Path) -> None:
    mount = 'mount --bind "$0" "$0" 2>/dev/null && mount -o remount,bind,ro "$0" 2>/dev/null'
    assert print_unshared(mount, READ_ONLY, tmp_path) == (
        f"[TIER-SPACE] nvme_path {tmp_path} is on a file system that is mounted read-only; remount it or name another"
        " directory\n"
    )


# What a directory is on


def test_memory_is_no_swap_space() -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir() or memory_file_system(shm) != "tmpfs":
        pytest.skip("/dev/shm is not a tmpfs here")
    with pytest.raises(SwapSpaceError) as caught:
        check_directory(shm)
    assert str(caught.value) == (
        "[TIER-SPACE] nvme_path /dev/shm is on tmpfs, which lives in RAM: state swapped there would use the memory it"
        " is meant to save; name a directory on a disk, or allow it with tiering.io.allow_memory_file_system"
    )
    with AioContext(engine="threads") as aio, pytest.raises(SwapSpaceError, match="is on tmpfs"):
        SlabFile(shm, PAGE, aio)


def test_a_disk_is_no_memory(tmp_path: Path, mounted: Callable[..., Path]) -> None:
    assert memory_file_system(mounted()) == ""
    assert memory_file_system(tmp_path / "missing") == ""


ON_OVERLAY = """
import sys
from pathlib import Path
from tiering.storage.swap_file import memory_file_system
print(repr(memory_file_system(Path(sys.argv[1]) / "merged")))
"""


@pytest.mark.parametrize(("where", "kind"), [("memory", "'tmpfs'"), ("disk", "''")])
def test_an_overlay_is_what_its_upper_directory_is(tmp_path: Path, where: str, kind: str) -> None:
    mount = (
        'cd "$0" && mkdir memory disk merged lower && mount -t tmpfs none memory'
        f" && mkdir {where}/upper {where}/work"
        f' && mount -t overlay none -o lowerdir="$0/lower,upperdir=$0/{where}/upper,workdir=$0/{where}/work" merged'
    )
    assert print_unshared(mount, ON_OVERLAY, tmp_path).strip() == kind


def test_directories_on_one_disk_are_known(tmp_path: Path, mounted: Callable[..., Path]) -> None:
    (tmp_path / "a").mkdir()
    other = mounted()
    assert disk_of(tmp_path) == disk_of(tmp_path / "a")
    assert Path(disk_of(other)).name.startswith("loop")
    assert disk_of(tmp_path) != disk_of(other)
