"""Checks of a directory: its file system, its drives, its space, and processes with unnamed files there."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.machines import CGROUP, NODE, STATUS, V1, machine
from tiering.commands.doctor import examine
from tiering.doctor import nameless, swap_directory
from tiering.doctor.finding import Finding, Verdict, problem
from tiering.doctor.nameless import Holder
from tiering.doctor.swap_directory import Trial, judge_trial, try_swap_file
from tiering.host.drives import Backing, Drive, FileSystem, Link
from tiering.host.quotas import Quota
from tiering.host.smart import Smart
from tiering.telemetry import Snapshot, StatusWriter

OK, NOTE, PROBLEM = Verdict.OK, Verdict.NOTE, Verdict.PROBLEM
GIB = 1 << 30
MIB = 1 << 20
NVIDIA = {
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Tue",
    "proc/driver/nvidia/gpus/0000:17:00.0/information": "Model: \t NVIDIA H200\nGPU UUID: \t GPU-8a7c",
}


def backing(
    type_: str = "ext4",
    kind: str = "disk",
    *options: str,
    upper: FileSystem | None = None,
    drives: tuple[Drive, ...] = (),
) -> Backing:
    return Backing(FileSystem(type_, kind, "/dev/x", "/mnt", ("rw", *options), upper), drives)


@pytest.mark.parametrize(
    ("mounted", "verdict", "text"),
    [
        (backing(), OK, "ext4, rw"),
        (backing("tmpfs", "memory"), PROBLEM, "tmpfs, which is in RAM"),
        (backing("overlay", "overlay", upper=backing("tmpfs", "memory").file_system), PROBLEM, "tmpfs"),
        (backing("overlay", "overlay", upper=backing().file_system), NOTE, "root of a container"),
        (backing("nfs4", "network"), NOTE, "nfs4"),
        (backing("bcachefs"), NOTE, "copy-on-write"),
        (backing("btrfs"), OK, "btrfs"),
        (backing("ext4", "disk", "data=journal"), NOTE, "twice"),
        (backing("xfs", "disk", "sync"), NOTE, "sync"),
    ],
)
def test_file_systems(mounted: Backing, verdict: Verdict, text: str) -> None:
    finding = swap_directory.file_system(mounted)
    assert (finding.verdict, bool(finding.remedy)) == (verdict, verdict is not OK)
    assert text in finding.found


FAST = Drive(
    "nvme0n1", transport="pcie", scheduler="none", numa_node=1, link=Link("PCIe 5.0 x4", 15.8e9), discard=True
)
HARD_DISK = Drive("sda", transport="sata", rotational=True, scheduler="bfq")


@pytest.mark.parametrize(
    ("drive", "text"),
    [
        (FAST, None),
        (replace(FAST, rotational=True, transport="virtio"), None),  # hypervisors report any disk so
        (HARD_DISK, "rotating disk"),
        (replace(FAST, transport="tcp"), "behind a network (tcp)"),
        (Drive("md0", layer="raid0", members=(FAST, FAST)), None),
        (Drive("md0", layer="raid5", members=(FAST, FAST)), "raid5 reads before"),
        (Drive("dm-0", layer="LVM", members=(Drive("dm-1", layer="crypt", members=(FAST,)),)), "encryption"),
        (Drive("loop0", layer="loop"), "a file that appears as a disk"),
        (Drive("zram0"), "memory that appears as a disk"),
    ],
)
def test_drives(drive: Drive, text: str | None) -> None:
    finding = swap_directory.drive(backing(drives=(drive,)))
    assert drive.name in finding.found
    assert finding.verdict is (OK if text is None else NOTE)
    assert text is None or (text in finding.found and finding.remedy)


def test_links_and_schedulers() -> None:
    slow = replace(FAST, link=Link("PCIe 3.0 x2", 2e9), best_link=FAST.link)
    assert swap_directory.link(backing(drives=(FAST,))) == Finding("nvme0n1 PCIe 5.0 x4, 15.8 GB/s")
    finding = swap_directory.link(backing(drives=(Drive("md0", members=(slow,)),)))
    assert finding.verdict is NOTE
    assert finding.found == "nvme0n1 has PCIe 3.0 x2, 2.0 GB/s, and supports PCIe 5.0 x4, 15.8 GB/s"

    assert swap_directory.scheduler(backing(drives=(FAST,))) == Finding("nvme0n1 none")
    assert (
        swap_directory.scheduler(backing(drives=(replace(HARD_DISK, scheduler="mq-deadline"),))).verdict is OK
    )
    for slow in (replace(FAST, scheduler="mq-deadline"), HARD_DISK):
        finding = swap_directory.scheduler(backing(drives=(slow,)))
        assert finding.verdict is NOTE
        assert finding.remedy == f"echo none | sudo tee /sys/block/{slow.name}/queue/scheduler"


def test_a_drive_on_another_numa_node(tmp_path: Path) -> None:
    files = {f"{NODE}0/cpulist": "0-7", f"{NODE}1/cpulist": "8-15"}
    finding = swap_directory.numa(backing(drives=(FAST,)), machine(tmp_path, files))
    assert finding.verdict is NOTE
    assert "nvme0n1 on node 1, but this process runs on CPUs 0-7" in finding.found
    assert "numactl --cpunodebind=1" in finding.remedy
    for own in ("8-9", "0-15"):
        machine(tmp_path, {"proc/self/status": STATUS.replace("0-7", own)})
        assert swap_directory.numa(backing(drives=(FAST,)), tmp_path) == Finding("nvme0n1 on node 1")


def test_discard(tmp_path: Path) -> None:
    finding = swap_directory.discard(backing(drives=(FAST,)), tmp_path)
    assert (finding.verdict, finding.remedy) == (NOTE, "sudo systemctl enable --now fstrim.timer")
    assert (
        "at once"
        in swap_directory.discard(backing("btrfs", "disk", "discard=async", drives=(FAST,)), tmp_path).found
    )
    assert swap_directory.discard(backing(drives=(HARD_DISK,)), tmp_path).verdict is OK
    machine(tmp_path, {"etc/systemd/system/timers.target.wants/fstrim.timer": ""})
    assert swap_directory.discard(backing(drives=(FAST,)), tmp_path) == Finding("by fstrim.timer")


def test_limits_of_cgroups_on_the_drive(tmp_path: Path) -> None:
    on = backing(drives=(FAST,))
    files = {
        "sys/class/block/nvme0n1/dev": "259:0",
        "proc/self/cgroup": "0::/job",
        f"{CGROUP}/io.max": "8:0 rbps=1 wbps=max riops=max wiops=max\n259:0 rbps=max wbps=max riops=max wiops=max",
    }
    assert swap_directory.io_limit(on, machine(tmp_path, files)) == Finding("none")
    machine(tmp_path, files | {f"{CGROUP}/job/io.max": "259:0 rbps=max wbps=1048576 riops=max wiops=120"})
    finding = swap_directory.io_limit(on, tmp_path)
    assert finding.verdict is NOTE
    assert "nvme0n1 io.max: wbps=1048576 wiops=120" in finding.found
    machine(
        tmp_path, {"proc/self/cgroup": V1, f"{CGROUP}/blkio/job/blkio.throttle.read_bps_device": "259:0 77"}
    )
    assert "blkio.throttle.read_bps_device: 77" in swap_directory.io_limit(on, tmp_path).found
    machine(
        tmp_path,
        {"proc/self/cgroup": V1, f"{CGROUP}/blkio/blkio.throttle.write_iops_device": "259:0 90"},
    )
    assert "blkio.throttle.write_iops_device: 90" in swap_directory.io_limit(on, tmp_path).found


def test_a_swap_file_is_really_made(tmp_path: Path) -> None:
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    trial = try_swap_file(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    assert trial.nameless
    assert trial.error == 0
    assert judge_trial(trial).verdict is (OK if trial.direct and trial.reserved else NOTE)
    assert list(tmp_path.iterdir()) == []
    assert try_swap_file(tmp_path / "none").error == errno.ENOENT
    assert try_swap_file(Path("/proc")) != trial


@pytest.mark.parametrize(
    ("trial", "verdict", "text"),
    [
        (Trial(), OK, "O_DIRECT work"),
        (Trial(direct=False), NOTE, "no O_DIRECT"),
        (Trial(reserved=False), NOTE, "no fallocate"),
        (Trial(in_place=False), NOTE, "no NOCOW"),
        (Trial(nameless=False), NOTE, "O_TMPFILE"),
        (Trial(error=errno.ENOSPC), PROBLEM, "ENOSPC"),
        (Trial(error=errno.EIO), PROBLEM, "EIO"),
    ],
)
def test_what_a_swap_file_was_given(trial: Trial, verdict: Verdict, text: str) -> None:
    finding = judge_trial(trial)
    assert (finding.verdict, bool(finding.remedy)) == (verdict, verdict is not OK)
    assert text in finding.found


def test_space() -> None:
    def of(free: int, inodes: int = 9) -> Finding:
        return swap_directory.space(
            os.statvfs_result(
                (4096, 4096, 1000 * GIB >> 12, free >> 12, free >> 12, 10, inodes, inodes, 0, 255)
            )
        )

    assert of(500 * GIB) == Finding("500.00 GiB of 1000.00 GiB free")
    assert of(40 * GIB).verdict is NOTE
    assert of(GIB // 2).verdict is PROBLEM
    assert of(500 * GIB, inodes=0).verdict is PROBLEM


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert swap_directory.reachable(tmp_path) == Finding("writable")
    assert swap_directory.reachable(tmp_path / "none") == problem(
        "does not exist", f"mkdir -p {tmp_path / 'none'}"
    )
    assert swap_directory.reachable(tmp_path / "file").verdict is PROBLEM
    assert [entry.check for entry in examine([tmp_path / "none"]) if entry.directory] == ["directory"]


def test_files_without_a_name_are_found(tmp_path: Path) -> None:
    """Unnamed files of this process, read from the real /proc."""
    named_file = tmp_path / "with a name (deleted)"
    with (
        named_file.open("wb") as file,
        os.fdopen(os.open(tmp_path, os.O_TMPFILE | os.O_RDWR, 0o600), "wb") as swap,
    ):
        for each in (file, swap):
            each.write(bytes(3 << 20))
            each.flush()
            os.fsync(each.fileno())  # blocks are counted once they are allocated
        duplicate = os.dup(swap.fileno())
        status = os.fstat(duplicate)
        own = [holder for holder in nameless.holders() if holder.process == os.getpid()]
        os.close(duplicate)
        assert named_file.stat().st_ino not in {holder.inode for holder in own}
        (holder,) = (holder for holder in own if holder.inode == status.st_ino)
        assert (holder.device, holder.nbytes) == (status.st_dev, status.st_blocks * 512)
        finding = swap_directory.checks(tmp_path)["files without a name"]()
        assert finding.verdict is NOTE
        assert f"(process {os.getpid()})" in finding.found
        assert swap_directory.checks(Path("/proc"))["files without a name"]() == Finding("none")
    assert status.st_ino not in {
        holder.inode for holder in nameless.holders() if holder.process == os.getpid()
    }


def test_a_file_of_several_processes_counts_once() -> None:
    holders = [Holder(process, "python", 1, 7, GIB) for process in range(10, 17)] + [
        Holder(10, "python", 1, 8, 3 * GIB)
    ]
    finding = nameless.judge([*holders, Holder(30, "empty", 1, 9, 0)])
    assert finding.found.startswith("4.00 GiB in 2 files")
    assert "python (process 10) 4.00 GiB, python (process 11) 1.00 GiB" in finding.found
    assert finding.found.endswith("2 more")
    assert nameless.judge([Holder(30, "empty", 1, 9, 0)]) == Finding("none")


def test_swap_space_of_a_live_run_is_ok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERING_RUN_DIR", str(tmp_path / "run"))
    own, stuck = Holder(os.getpid(), "python", 1, 8, 4 * MIB), Holder(30, "stuck", 1, 9, MIB)
    assert nameless.judge([own]).verdict is NOTE
    with closing(StatusWriter("gpt")) as writer:
        writer.publish(Snapshot("gpt", 0, 1, os.getpid(), 1.0, global_step=12))
        assert nameless.judge([own]) == Finding("swap space of run gpt, step 12")
        finding = nameless.judge([own, stuck])
        assert finding.verdict is NOTE and finding.found.startswith("1.00 MiB in 1 file without")
        assert "stuck (process 30)" in finding.found and "python" not in finding.found
        assert finding.remedy.endswith("ps -fp 30") and "kill" not in finding.remedy
    assert nameless.judge([own]).verdict is NOTE, "its status file is removed"


@pytest.mark.parametrize(
    ("left", "verdict", "text"),
    [([], OK, "none"), ([5 * GIB], OK, "5.00 GiB of"), ([GIB - 1], PROBLEM, "for this user")],
)
def test_a_quota_with_little_left_is_a_problem(left: list[int], verdict: Verdict, text: str) -> None:
    finding = swap_directory.quota([Quota("user", 8 * GIB, 8 * GIB - nbytes) for nbytes in left])
    assert (finding.verdict, text in finding.found) == (verdict, True)


HEALTHY = Smart(0.07, 1.0, 0.1, 10**12, 0, 0)


@pytest.mark.parametrize(
    ("log", "verdict", "text"),
    [
        (HEALTHY, OK, "nvme0n1 7% used, 1 TB written, of about 14.3 TB by its own estimate, 100% spare"),
        (replace(HEALTHY, used=0.8), NOTE, "80% used"),
        (replace(HEALTHY, spare=0.05), NOTE, "5% spare"),
        (replace(HEALTHY, warnings=4), NOTE, "critical warning 0x04"),
        (replace(HEALTHY, media_errors=2), NOTE, "2 media errors"),
        (PermissionError(errno.EPERM, "no"), OK, "unknown: only root may read its SMART log"),
        (OSError(errno.ENOTTY, "no such command"), OK, "cannot be read (no such command)"),
    ],
)
def test_a_worn_drive_is_noted(
    log: Smart | OSError, verdict: Verdict, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(name: str, devices: Path) -> Smart:
        assert name == "nvme0n1"
        if isinstance(log, OSError):
            raise log
        return log

    monkeypatch.setattr(swap_directory, "read_smart", read)
    finding = swap_directory.wear(backing(drives=(FAST, HARD_DISK)))
    assert (finding.verdict, bool(finding.remedy)) == (verdict, verdict is not OK)
    assert text in finding.found
    assert swap_directory.wear(backing(drives=(HARD_DISK,))) == Finding("unknown: no NVMe drive is visible")
