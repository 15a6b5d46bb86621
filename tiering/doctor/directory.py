"""A directory for swap space: what its file system can do, how full it is, and the drives behind it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
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
from tiering.host.kernel_files import said
from tiering.host.topology import format_cpus, parse_cpus

PAGE = 4096
SPACE = 1 << 30
"""Bytes: less is no room for anybody's optimizer state."""
FULL = 0.05
"""Of a file system: with less free, drives have few empty blocks left and write slowly."""

_COPY_ON_WRITE = frozenset({"btrfs", "zfs", "bcachefs"})
_FS_IOC_GETFLAGS, _FS_NOCOW_FL = 0x80086601, 0x00800000  # linux/fs.h
_NETWORK_TRANSPORTS = frozenset({"tcp", "rdma", "fc", "iscsi"})
_VIRTUAL_TRANSPORTS = frozenset({"virtio", "xen", "vmbus"})  # they call every disk a rotating one
_ANOTHER = "name a directory on a local drive"


def checks(directory: Path, root: Path = Path("/")) -> dict[str, Callable[[], Finding]]:
    """What can be asked of ``directory``. Looking for its drives may itself hang, so nothing is looked at yet."""
    look = cache(partial(behind, directory, root / "sys", root / "proc/self/mountinfo"))
    return {
        "directory": lambda: reachable(directory),
        "file system": lambda: file_system(look(), copies_on_write(directory)),
        "swap file": lambda: judge_trial(try_swap_file(directory)),
        "space": lambda: space(os.statvfs(directory)),
        "files without a name": lambda: nameless.judge(
            holder for holder in nameless.holders(root) if holder.device == directory.stat().st_dev
        ),
        "drive": lambda: drive(look()),
        "link": lambda: link(look()),
        "scheduler": lambda: scheduler(look()),
        "drive's NUMA node": lambda: numa(look(), root),
        "discard": lambda: discard(look(), root),
        "cgroup I/O limit": lambda: io_limit(look(), root),
    }


def reachable(directory: Path) -> Finding:
    if not directory.exists():
        return problem("does not exist", f"mkdir -p {directory}")
    if not directory.is_dir():
        return problem("is not a directory", "name one")
    if os.statvfs(directory).f_flag & os.ST_RDONLY:
        return problem(
            "is mounted read-only", "remount it (see dmesg if it was not always so), or name another"
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        return problem("is not writable by this user", "change its mode or owner, or name another")
    return Finding("writable")


def copies_on_write(directory: Path) -> bool | None:
    """Whether new files in ``directory`` are written elsewhere each time; None if it does not say."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flags = struct.unpack("i", fcntl.ioctl(fd, _FS_IOC_GETFLAGS, bytes(4)))[0]
    except OSError:
        return None
    finally:
        os.close(fd)
    return not flags & _FS_NOCOW_FL


def file_system(backing: Backing, copied: bool | None = None) -> Finding:
    mounted = backing.file_system
    lowest = mounted.upper or mounted
    if lowest.kind == "memory":
        return problem(
            f"{lowest.type}, which lives in RAM: the engine refuses to swap memory to memory", _ANOTHER
        )
    if mounted.kind == "overlay":
        return note(
            "overlay, the root of a container: what is written goes through it",
            "mount a directory of a drive into the container: docker run -v /mnt/nvme:/mnt/nvme",
        )
    if mounted.kind == "network":
        return note(f"{mounted.type}: each step goes to a server or another program and back", _ANOTHER)
    if mounted.type in _COPY_ON_WRITE and copied is not False:
        remedy = {
            "btrfs": "make an empty directory for swap, and chattr +C it",
            "zfs": "give swap a data set of its own: zfs create -o compression=off -o primarycache=metadata"
            " -o recordsize=1M POOL/swap; better ext4 or XFS",
        }
        return note(
            f"{mounted.type}, which writes every block elsewhere (copy-on-write) and sums it",
            remedy.get(mounted.type, "use ext4 or XFS"),
        )
    if "data=journal" in mounted.options:
        return note(
            f"{mounted.type} with data=journal: everything is written twice", "mount it with data=ordered"
        )
    if "sync" in mounted.options:
        return note(
            f"{mounted.type}, mounted sync: every write waits for the drive's cache", "mount it without sync"
        )
    return Finding(", ".join([mounted.type, *(option for option in mounted.options if "=" not in option)]))


@dataclass(frozen=True)
class Trial:
    """What a swap file was given. ``error`` is an errno that ended the trial, 0 for none."""

    nameless: bool = True
    reserved: bool = True
    direct: bool = True
    error: int = 0


def try_swap_file(directory: Path, nbytes: int = 1 << 20) -> Trial:
    """Make a file without a name, reserve ``nbytes``, write and read a page around the page cache. Leaves nothing."""
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
        code = -int(lib.aio_reserve(fd, nbytes))
        if code not in (0, errno.EOPNOTSUPP, errno.ENOSYS):
            return Trial(error=code)
        with mmap.mmap(-1, PAGE) as page:
            try:
                os.pwritev(fd, [page], 0)
                os.preadv(fd, [page], 0)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    return Trial(error=error.errno or errno.EIO)
                direct = False
        return Trial(reserved=code == 0, direct=direct)
    finally:
        os.close(fd)


def judge_trial(trial: Trial) -> Finding:
    if trial.error:
        remedy = {
            errno.ENOSPC: "make room there",
            errno.EDQUOT: "raise the quota",
            errno.EROFS: "remount it writable",
            errno.EACCES: "change its mode or owner",
            errno.EPERM: "change its mode or owner",
        }.get(trial.error, "see dmesg")
        name = errno.errorcode.get(trial.error, str(trial.error))
        return problem(
            f"cannot be made: {name}, {os.strerror(trial.error)}", f"{remedy}, or name another directory"
        )
    if not trial.nameless:
        return note(
            "no files without a name (O_TMPFILE): a run that is killed while it makes one leaves it, and what else is"
            " missing shows when one is made",
            "use ext4, XFS or btrfs",
        )
    missing = []
    if not trial.direct:
        missing.append("no O_DIRECT: the page cache takes memory beyond the budgets")
    if not trial.reserved:
        missing.append("no fallocate: a full disk shows only when it is written to")
    if missing:
        return note("; ".join(missing), "use ext4 or XFS on a local drive")
    return Finding("O_TMPFILE, fallocate and O_DIRECT work")


def space(status: os.statvfs_result) -> Finding:
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    found = f"{format_size(free)} of {format_size(total)} free"
    if free < SPACE:
        return problem(found, "free some: see 'files without a name', du -x, and old checkpoints")
    if status.f_files and not status.f_favail:
        return problem(f"{found}, but no inode for another file", "remove files; df -i counts them")
    if free < FULL * total:
        return note(f"{found}: a nearly full drive writes slowly", "free some, and run sudo fstrim -a")
    return Finding(found)


def drive(backing: Backing) -> Finding:
    if not backing.drives:
        return Finding("none that can be seen from here")
    shown = "; ".join(str(each) for each in backing.drives)
    if len(backing.disks) > 1 or backing.disks[0] not in backing.drives:
        shown += f" on {'; '.join(str(disk) for disk in backing.disks)}"
    reasons = dict.fromkeys(reason for each in backing.drives for reason in _objections(each))
    if reasons:
        return note(
            f"{shown}: {'; '.join(what for what, _ in reasons)}", "; ".join(remedy for _, remedy in reasons)
        )
    return Finding(shown)


def _objections(drive: Drive) -> list[tuple[str, str]]:
    """(what, remedy) for each thing in the stack that swapping will feel."""
    found = [objection for member in drive.members for objection in _objections(member)]
    if drive.layer in ("raid4", "raid5", "raid6"):
        found.append(
            (f"{drive.layer} reads before it writes", "use RAID 0, or name each drive as a path of its own")
        )
    if drive.layer == "crypt":
        found.append(
            (
                "encryption takes CPU time and a detour by its own threads",
                "cryptsetup refresh --perf-no_read_workqueue --perf-no_write_workqueue NAME",
            )
        )
    if drive.poses is not None:
        found.append((drive.poses, _ANOTHER))
    if drive.transport in _NETWORK_TRANSPORTS:
        found.append((f"a disk behind a network ({drive.transport})", _ANOTHER))
    if drive.rotational and not drive.members and drive.transport not in _VIRTUAL_TRANSPORTS:
        found.append(("it rotates: a seek takes 10 ms", "use a solid-state drive"))
    return found


def link(backing: Backing) -> Finding:
    slow = [disk for disk in backing.disks if disk.best_link is not None]
    if slow:
        shown = ", ".join(f"{disk.name} has {disk.link}, and could have {disk.best_link}" for disk in slow)
        return note(
            shown,
            "put it into a slot wired for that (the mainboard's manual), reseat it, and see the firmware's setting of"
            " link speed; sudo lspci -vv shows LnkCap and LnkSta",
        )
    return Finding(", ".join(f"{disk.name} {disk.link}" for disk in backing.disks if disk.link) or "not told")


def scheduler(backing: Backing) -> Finding:
    known = [disk for disk in backing.disks if disk.scheduler is not None]
    # What is not NVMe has one queue and a throughput that mq-deadline does not limit.
    slow = [
        disk
        for disk in known
        if disk.scheduler == "bfq" or (disk.name.startswith("nvme") and disk.scheduler != "none")
    ]
    shown = ", ".join(f"{disk.name} {disk.scheduler}" for disk in known) or "not told"
    if not slow:
        return Finding(shown)
    commands = [f"echo none | sudo tee /sys/block/{disk.name}/queue/scheduler" for disk in slow]
    return note(f"{shown}: it costs CPU time, and throughput", "; ".join(commands))


def numa(backing: Backing, root: Path) -> Finding:
    nodes = {disk.name: disk.numa_node for disk in backing.disks if disk.numa_node is not None}
    if not nodes:
        return Finding("not told")
    shown = ", ".join(f"{name} on node {node}" for name, node in nodes.items())
    own = own_cpus(root)
    apart = [
        node
        for node in dict.fromkeys(nodes.values())
        if (cpus := parse_cpus(said(root / f"sys/devices/system/node/node{node}/cpulist") or ""))
        and not set(cpus) & set(own)
    ]
    if not apart or not own:
        return Finding(shown)
    return note(
        f"{shown}, but this process runs on CPUs {format_cpus(own)}, on another: bytes cross the sockets",
        f"numactl --cpunodebind={apart[0]} --preferred={apart[0]} ..., or a drive of the own node",
    )


def discard(backing: Backing, root: Path) -> Finding:
    able = [each for each in backing.drives if each.discard]
    if not able:
        return Finding("not supported by the drive, or the layers above it" if backing.drives else "not told")
    if any(option == "discard" or option.startswith("discard=") for option in backing.file_system.options):
        return Finding("at once (mounted with discard)")
    if (root / "etc/systemd/system/timers.target.wants/fstrim.timer").exists():
        return Finding("by fstrim.timer")
    return note(
        "never, as it seems: a drive that is not told what was freed writes slower and wears faster",
        "sudo systemctl enable --now fstrim.timer",
    )


def io_limit(backing: Backing, root: Path) -> Finding:
    """What cgroups allow for the drives themselves or the layers above them."""
    named = {}
    for each in (*backing.drives, *backing.disks):
        number = said(root / "sys/class/block" / each.name / "dev")
        if number is not None:
            named[number] = each.name
    limits = [
        f"{named[limit.drive]} {limit.file}: {limit.words}"
        for limit in io_limits(root)
        if limit.drive in named
    ]
    if not limits:
        return Finding("none")
    return note(
        f"{', '.join(dict.fromkeys(limits))} (bytes or operations per second)",
        "raise it (systemctl set-property UNIT IOReadBandwidthMax=..., docker run --device-read-bps), or name a"
        " directory on another drive",
    )
