"""Which directories are refused, how much of them is taken, and that one run at a time is in each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiering.errors import SwapSpaceError, UnsafeTargetError
from tiering.tierbench.load import target

MIB = 1 << 20


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that every file system has free."""
    nbytes = 1000 * MIB
    monkeypatch.setattr(target, "free_bytes", lambda directory: nbytes)
    return nbytes


def test_a_directory_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inner").mkdir()
    assert target.check(tmp_path) == target.check(Path()) == tmp_path
    assert target.check_all([tmp_path, Path("inner")]) == (tmp_path, tmp_path / "inner")


def test_a_device_is_refused() -> None:
    with pytest.raises(UnsafeTargetError, match="/dev/null is a device; name a directory on the drive"):
        target.check(Path("/dev/null"))


def test_a_block_device_is_refused_with_what_it_would_destroy() -> None:
    disks = [path for path in Path("/dev").iterdir() if path.is_block_device()]
    if not disks:
        pytest.skip("this machine has no block device")
    with pytest.raises(UnsafeTargetError, match="a block device: writing to it would destroy what is on it"):
        target.check(disks[0])


def test_a_link_to_a_directory_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "second").symlink_to("link")
    (tmp_path / "below").symlink_to(tmp_path)
    for name in ("link", "second", "below/link"):
        assert target.check(tmp_path / name) == tmp_path / "real"
    with pytest.raises(SwapSpaceError, match="real is named twice"):
        target.check_all([tmp_path / "link", tmp_path / "real"])


def test_a_link_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    (tmp_path / "one").symlink_to("other")
    (tmp_path / "other").symlink_to("one")
    for name, words in (
        ("dangling", rf"dangling cannot be reached: No such file or directory; .*mkdir -p {tmp_path}/gone\)"),
        ("one", "one cannot be reached: Too many levels of symbolic links; remove the symbolic links"),
    ):
        with pytest.raises(SwapSpaceError, match=words):
            target.check(tmp_path / name)


def test_a_file_and_a_pipe_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "device").symlink_to("/dev/null")
    for name, words in (
        ("file", "is a file; name a directory"),
        ("pipe", "is a pipe"),
        ("link", "link is a file; name a directory"),
        ("device", "device is a device; name a directory"),
    ):
        with pytest.raises(UnsafeTargetError, match=words):
            target.check(tmp_path / name)
    assert (tmp_path / "file").read_text() == "precious"


def test_memory_is_no_drive() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("this machine has no /dev/shm")
    with pytest.raises(UnsafeTargetError, match="is on tmpfs, which is memory and not a drive"):
        target.check(Path("/dev/shm"))


def test_what_is_missing_or_named_twice_is_a_wrong_question(tmp_path: Path) -> None:
    with pytest.raises(SwapSpaceError, match=r"cannot be reached: No such file .*; create it \(mkdir -p"):
        target.check(tmp_path / "missing")
    (tmp_path / "x").mkdir()
    with pytest.raises(SwapSpaceError, match="is named twice"):
        target.check_all([tmp_path, tmp_path / "x" / ".."])


def test_a_name_that_no_configuration_can_have(tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"odd\xff")
    odd.mkdir()
    with pytest.raises(SwapSpaceError, match="is not valid UTF-8"):
        target.check(odd)


def test_the_usual_size_is_a_tenth_of_what_is_free(tmp_path: Path, free: int) -> None:
    assert target.file_size([tmp_path], numjobs=1, bs=MIB) == free // 10 // MIB * MIB
    other = tmp_path / "same disk"
    other.mkdir()
    assert target.file_size([tmp_path, other], numjobs=2, bs=MIB) == free // 40 // MIB * MIB


def test_the_usual_size_is_capped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "free_bytes", lambda directory: 10**15)
    assert target.file_size([tmp_path], numjobs=1, bs=MIB) == target.DEFAULT_SIZE
    assert target.file_size([tmp_path], numjobs=4, bs=MIB) == target.DEFAULT_SIZE // 4


def test_a_size_that_would_fill_the_disk_is_refused(tmp_path: Path, free: int) -> None:
    assert target.file_size([tmp_path], numjobs=1, bs=MIB, requested=free * 9 // 10) == free * 9 // 10
    with pytest.raises(UnsafeTargetError, match="would leave less than a tenth of the free space"):
        target.file_size([tmp_path], numjobs=1, bs=MIB, requested=free * 9 // 10 + MIB)
    with pytest.raises(UnsafeTargetError, match=r"2 files of 500\.00 MiB"):
        target.file_size([tmp_path], numjobs=2, bs=MIB, requested=500 * MIB)


def test_a_disk_without_room_for_four_blocks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "free_bytes", lambda directory: 3 * MIB)
    with pytest.raises(UnsafeTargetError, match=r"1 file of 4\.00 MiB would leave less"):
        target.file_size([tmp_path], numjobs=1, bs=MIB)


def test_one_run_per_directory(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from tiering.tierbench.load import target
with target.alone_in([Path({str(tmp_path)!r})]):
    pass
"""
    with target.alone_in([tmp_path]):
        second = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "another tierbench is running in" in second.stderr
    subprocess.run([sys.executable, "-c", program], check=True)
    assert list(tmp_path.iterdir()) == []
