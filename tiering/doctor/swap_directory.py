"""Checks of a directory for swap space: its file system, its free space, and the drives behind it."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from tiering._aio import lib
from tiering.config.fields import format_size
from tiering.doctor import nameless
from tiering.doctor.cpus import own_cpus
from tiering.doctor.finding import Finding, note, problem
from tiering.host.cgroups import io_limits
from tiering.host.drives import Backing, Drive, behind
from tiering.host.kernel_files import text_of
from tiering.host.quotas import Quota, quotas
from tiering.host.smart import Smart, read_smart
from tiering.host.topology import format_cpus, parse_cpus
from tiering.storage.file_system import direct_alignment
from tiering.storage.swap_file import overwrites_in_place

MIN_SPACE = 1 << 30
"""Bytes. Less free space cannot hold any optimizer state."""
LOW_SPACE = 0.05
"""Fraction of a file system. With less free space, drives have few erased blocks and write slowly."""

# btrfs does not copy the blocks of a swap file: see the trial.
_COPY_ON_WRITE = frozenset({"zfs", "bcachefs"})
_NETWORK_TRANSPORTS = frozenset({"tcp", "rdma", "fc", "iscsi"})
_USE_LOCAL_DRIVE = "name a directory on a local drive"


def checks(directory: Path, root: Path = Path("/")) -> dict[str, Callable[[], Finding]]:
    """The checks of ``directory``, by name. The search for its drives may hang, so that the first check starts it."""
    backing = cache(partial(behind, directory, root / "sys", root / "proc/self/mountinfo"))
    return {
        "directory": lambda: reachable(directory),
        "file system": lambda: file_system(backing()),
        "swap file": lambda: judge_trial(try_swap_file(directory)),
        "space": lambda: space(os.statvfs(directory)),
        "quota": lambda: quota(list(quotas(directory))),
        "files without a name": lambda: nameless.judge(
            holder for holder in nameless.holders(root) if holder.device == directory.stat().st_dev
        ),
        "drive": lambda: drive(backing()),
        "drive's wear": lambda: wear(backing(), root / "dev"),
        "link": lambda: link(backing()),
        "scheduler": lambda: scheduler(backing()),
        "drive's NUMA node": lambda: numa(backing(), root),
        "discard": lambda: discard(backing(), root),
        "cgroup I/O limit": lambda: io_limit(backing(), root),
    }


def reachable(directory: Path) -> Finding:
    if not directory.exists():
        return problem("does not exist", f"mkdir -p {directory}")
    if not directory.is_dir():
        return problem("is not a directory", "name a directory")
    if os.statvfs(directory).f_flag & os.ST_RDONLY:
        return problem(
            "is mounted read-only",
            "remount it writable (dmesg shows if an error made it read-only), or name another",
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        return problem("is not writable by this user", "change its mode or owner, or name another")
    return Finding("writable")


def file_system(backing: Backing) -> Finding:
    mounted = backing.file_system
    lowest = mounted.upper or mounted
    if lowest.kind == "memory":
        return problem(
            f"{lowest.type}, which is in RAM: the engine refuses to swap memory to memory", _USE_LOCAL_DRIVE
        )
    if mounted.kind == "overlay":
        return note(
            "overlay, the root of a container: each write passes through it",
            "mount a directory of a drive into the container: docker run -v /mnt/nvme:/mnt/nvme",
        )
    if mounted.kind == "network":
        return note(
            f"{mounted.type}: each transfer passes through a server or another process", _USE_LOCAL_DRIVE
        )
    if mounted.type in _COPY_ON_WRITE:
        remedy = {
            "zfs": "create a data set for swap space: zfs create -o compression=off -o primarycache=metadata"
            " -o recordsize=1M POOL/swap; ext4 or XFS is better",
        }
        return note(
            f"{mounted.type}, which writes every block to a new place (copy-on-write) and checksums it",
            remedy.get(mounted.type, "use ext4 or XFS"),
        )
    if "data=journal" in mounted.options:
        return note(
            f"{mounted.type} with data=journal: all data is written twice", "mount it with data=ordered"
        )
    if "sync" in mounted.options:
        return note(
            f"{mounted.type}, mounted sync: every write waits for the drive's cache", "mount it without sync"
        )
    return Finding(", ".join([mounted.type, *(option for option in mounted.options if "=" not in option)]))


@dataclass(frozen=True)
class Trial:
    """The features that a trial swap file got. ``error`` is the errno that ended the trial, 0 for none."""

    nameless: bool = True
    in_place: bool = True
    reserved: bool = True
    direct: bool = True
    error: int = 0


def try_swap_file(directory: Path, nbytes: int = 1 << 20) -> Trial:
    """Create an unnamed file, reserve ``nbytes``, write and read a page with O_DIRECT. The file ends with the call."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_TMPFILE
    direct = True
    try:
        try:
            fd = os.open(directory, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            direct = False
            fd = os.open(directory, flags, 0o600)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOSYS):
            return Trial(nameless=False)
        return Trial(error=error.errno or errno.EIO)
    try:
        in_place = overwrites_in_place(fd, directory)
        code = -int(lib.aio_reserve(fd, nbytes))
        if code not in (0, errno.EOPNOTSUPP, errno.ENOSYS):
            return Trial(error=code)
        with mmap.mmap(-1, direct_alignment(fd)) as page:
            try:
                os.pwritev(fd, [page], 0)
                os.preadv(fd, [page], 0)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    return Trial(error=error.errno or errno.EIO)
                direct = False
        return Trial(in_place=in_place, reserved=code == 0, direct=direct)
    finally:
        os.close(fd)


def judge_trial(trial: Trial) -> Finding:
    if trial.error:
        remedy = {
            errno.ENOSPC: "free some space",
            errno.EDQUOT: "raise the quota",
            errno.EROFS: "remount it writable",
            errno.EACCES: "change its mode or owner",
            errno.EPERM: "change its mode or owner",
        }.get(trial.error, "see dmesg")
        name = errno.errorcode.get(trial.error, str(trial.error))
        return problem(
            f"cannot be created: {name}, {os.strerror(trial.error)}", f"{remedy}, or name another directory"
        )
    if not trial.nameless:
        return note(
            "no unnamed files (O_TMPFILE): a run that is killed while it creates its swap file leaves it behind; other"
            " missing features show when a run creates one",
            "use ext4, XFS or btrfs",
        )
    missing = []
    if not trial.direct:
        missing.append("no O_DIRECT: the page cache takes memory beyond the budgets")
    if not trial.in_place:
        missing.append("no NOCOW: each overwrite takes new blocks (copy-on-write)")
    if not trial.reserved:
        missing.append("no fallocate: a full disk is detected only by a failing write")
    if missing:
        return note("; ".join(missing), "use ext4 or XFS on a local drive")
    return Finding("O_TMPFILE, fallocate and O_DIRECT work")


def space(status: os.statvfs_result) -> Finding:
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    text = f"{format_size(free)} of {format_size(total)} free"
    if free < MIN_SPACE:
        return problem(text, "free some space: see 'files without a name', du -x, and old checkpoints")
    if status.f_files and not status.f_favail:
        return problem(f"{text}, but no free inode", "remove files; df -i counts them")
    if free < LOW_SPACE * total:
        return note(f"{text}: a nearly full drive writes slowly", "free some space, and run sudo fstrim -a")
    return Finding(text)


def quota(limits: list[Quota]) -> Finding:
    if not limits:
        return Finding("none")
    text = ", ".join(
        f"{format_size(limit.left)} of {format_size(limit.limit)} left for this {limit.kind}"
        for limit in limits
    )
    # Swap files are allocated before the first step, so that a quota stops a run at its start.
    if min(limit.left for limit in limits) < MIN_SPACE:
        return problem(text, "remove files of this owner there, or ask for a larger quota (setquota)")
    return Finding(text)


WORN = 0.8
"""Part of the endurance of a drive from which on it should be replaced soon."""


def wear(backing: Backing, devices: Path = Path("/dev")) -> Finding:
    """The SMART logs of the NVMe drives."""
    texts, remedies = [], []
    for disk in backing.disks:
        if not disk.name.startswith("nvme"):
            continue
        try:
            log = read_smart(disk.name, devices)
        except PermissionError:
            texts.append(f"{disk.name} unknown: only root may read its SMART log (sudo tiering doctor DIR)")
            continue
        except OSError as error:
            texts.append(f"{disk.name} unknown: its SMART log cannot be read ({error.strerror})")
            continue
        texts.append(_wear_of(disk.name, log))
        if log.warnings or log.spare < log.least_spare or log.used >= WORN or log.media_errors:
            remedies.append(f"back up its data, and plan to replace {disk.name}; see sudo smartctl -a")
    if not texts:
        return Finding("unknown: no NVMe drive is visible")
    return note("; ".join(texts), "; ".join(remedies)) if remedies else Finding("; ".join(texts))


def _wear_of(name: str, log: Smart) -> str:
    parts = [f"{name} {log.used:.0%} used", f"{log.written / 1e12:.3g} TB written"]
    if log.endurance is not None:
        parts.append(f"of about {log.endurance / 1e12:.3g} TB by its own estimate")
    parts.append(f"{log.spare:.0%} spare blocks left")
    if log.media_errors:
        parts.append(f"{log.media_errors} media errors")
    if log.warnings:
        parts.append(f"critical warning {log.warnings:#04x}")
    return ", ".join(parts)


def drive(backing: Backing) -> Finding:
    if not backing.drives:
        return Finding("none visible to this process")
    text = "; ".join(str(each) for each in backing.drives)
    if len(backing.disks) > 1 or backing.disks[0] not in backing.drives:
        text += f" on {'; '.join(str(disk) for disk in backing.disks)}"
    issues = dict.fromkeys(issue for each in backing.drives for issue in _issues(each))
    if issues:
        return note(
            f"{text}: {'; '.join(issue for issue, _ in issues)}", "; ".join(remedy for _, remedy in issues)
        )
    return Finding(text)


def _issues(drive: Drive) -> list[tuple[str, str]]:
    """(issue, remedy) for each property of the drive and its members that slows swapping down."""
    issues = [issue for member in drive.members for issue in _issues(member)]
    if drive.layer in ("raid4", "raid5", "raid6"):
        issues.append(
            (f"{drive.layer} reads before it writes", "use RAID 0, or name each drive as a separate path")
        )
    if drive.layer == "crypt":
        issues.append(
            (
                "encryption takes CPU time and passes each request through its own threads",
                "cryptsetup refresh --perf-no_read_workqueue --perf-no_write_workqueue NAME",
            )
        )
    if drive.poses is not None:
        issues.append((drive.poses, _USE_LOCAL_DRIVE))
    if drive.transport in _NETWORK_TRANSPORTS:
        issues.append((f"a disk behind a network ({drive.transport})", _USE_LOCAL_DRIVE))
    if drive.spins:
        issues.append(("a rotating disk: a seek takes 10 ms", "use a solid-state drive"))
    return issues


def link(backing: Backing) -> Finding:
    slow = [disk for disk in backing.disks if disk.best_link is not None]
    if slow:
        text = ", ".join(f"{disk.name} has {disk.link}, and supports {disk.best_link}" for disk in slow)
        return note(
            text,
            "use a slot with these lanes (see the mainboard's manual), reseat the drive, and check the link speed in"
            " the firmware settings; sudo lspci -vv shows LnkCap and LnkSta",
        )
    return Finding(", ".join(f"{disk.name} {disk.link}" for disk in backing.disks if disk.link) or "unknown")


def scheduler(backing: Backing) -> Finding:
    scheduled = [disk for disk in backing.disks if disk.scheduler is not None]
    # Other disks than NVMe have a single queue, and mq-deadline does not limit their throughput.
    slow = [
        disk
        for disk in scheduled
        if disk.scheduler == "bfq" or (disk.name.startswith("nvme") and disk.scheduler != "none")
    ]
    text = ", ".join(f"{disk.name} {disk.scheduler}" for disk in scheduled) or "unknown"
    if not slow:
        return Finding(text)
    commands = [f"echo none | sudo tee /sys/block/{disk.name}/queue/scheduler" for disk in slow]
    return note(f"{text}: it costs CPU time and throughput", "; ".join(commands))


def numa(backing: Backing, root: Path) -> Finding:
    nodes = {disk.name: disk.numa_node for disk in backing.disks if disk.numa_node is not None}
    if not nodes:
        return Finding("unknown")
    text = ", ".join(f"{name} on node {node}" for name, node in nodes.items())
    own = own_cpus(root)
    remote = [
        node
        for node in dict.fromkeys(nodes.values())
        if (cpus := parse_cpus(text_of(root / f"sys/devices/system/node/node{node}/cpulist") or ""))
        and not set(cpus) & set(own)
    ]
    if not remote or not own:
        return Finding(text)
    return note(
        f"{text}, but this process runs on CPUs {format_cpus(own)} of another node: transfers cross sockets",
        f"numactl --cpunodebind={remote[0]} --preferred={remote[0]} ..., or use a drive of this node",
    )


def discard(backing: Backing, root: Path) -> Finding:
    if not any(each.discard for each in backing.drives):
        return Finding("not supported by the drive, or the layers above it" if backing.drives else "unknown")
    if any(option == "discard" or option.startswith("discard=") for option in backing.file_system.options):
        return Finding("at once (mounted with discard)")
    if (root / "etc/systemd/system/timers.target.wants/fstrim.timer").exists():
        return Finding("by fstrim.timer")
    return note(
        "probably never: a drive that does not learn which blocks are free writes slower and wears faster",
        "sudo systemctl enable --now fstrim.timer",
    )


def io_limit(backing: Backing, root: Path) -> Finding:
    """I/O limits of cgroups for the drives or the layers above them."""
    # Drive names by device number ("259:0").
    drive_names = {}
    for each in (*backing.drives, *backing.disks):
        number = text_of(root / "sys/class/block" / each.name / "dev")
        if number is not None:
            drive_names[number] = each.name
    limits = [
        f"{drive_names[limit.drive]} {limit.file}: {limit.words}"
        for limit in io_limits(root)
        if limit.drive in drive_names
    ]
    if not limits:
        return Finding("none")
    return note(
        f"{', '.join(dict.fromkeys(limits))} (bytes or operations per second)",
        "raise it (systemctl set-property UNIT IOReadBandwidthMax=..., docker run --device-read-bps), or name a"
        " directory on another drive",
    )
