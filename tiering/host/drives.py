"""The file system and the drives behind a directory, as the kernel reports them. No torch.

/proc/self/mountinfo lists mounts, sysfs block devices. Both may be incomplete: containers hide entries, hypervisors
invent some, drivers omit files. So missing or invalid values are None, and nothing is raised for them. Serial numbers
are not read, because the results appear in reports and issues.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tiering.host.kernel_files import listed, number, text_of

SYSFS = Path("/sys")
MOUNTINFO = Path("/proc/self/mountinfo")

Kind = Literal["disk", "network", "memory", "overlay", "unknown"]

SECTOR = 512
"""Bytes: the unit of a block device's ``size`` and ``stat``, independent of its sector size."""

_MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"})
_NETWORK = frozenset(
    {
        "9p",
        "acfs",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "coda",
        "fuse",
        "glusterfs",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
    }
    | {"orangefs", "panfs", "prl_fs", "pvfs2", "smb3", "smbfs", "vboxsf", "virtiofs", "vmhgfs", "wekafs"}
)

# By GT/s of a lane: (generation, fraction of the bits that are data).
_PCIE = {
    2.5: ("1.0", 8 / 10),
    5.0: ("2.0", 8 / 10),
    8.0: ("3.0", 128 / 130),
    16.0: ("4.0", 128 / 130),
    32.0: ("5.0", 128 / 130),
    # Of each flit of 256 bytes, 6 are link control, 8 a checksum and 6 error correction.
    64.0: ("6.0", 236 / 256),
}
# 0, 63 and 255 mean "unknown".
_PCIE_LANES = frozenset({1, 2, 4, 8, 12, 16, 32})

# By the name of a directory above the device; the first match counts.
_TRANSPORTS = (
    (re.compile(r"usb\d+"), "usb"),
    (re.compile(r"ata\d+"), "sata"),
    (re.compile(r"virtio\d+"), "virtio"),
    (re.compile(r"session\d+"), "iscsi"),
    (re.compile(r"rport-.*"), "fc"),
    (re.compile(r"end_device-.*"), "sas"),
    (re.compile(r"mmc\d+"), "mmc"),
    (re.compile(r"vbd-\d+"), "xen"),
    (re.compile(r"VMBUS:.*|vmbus.*", re.IGNORECASE), "vmbus"),
)

# These report every disk as rotating.
_VIRTUAL_TRANSPORTS = frozenset({"virtio", "xen", "vmbus"})

# By the prefix of a device mapper uuid.
_LAYERS = {"LVM": "LVM", "CRYPT": "crypt", "mpath": "multipath", "DMRAID": "dmraid"}
# Layers. A deeper stack is assumed to be a cycle.
_MAX_LAYERS = 8


@dataclass(frozen=True)
class FileSystem:
    """A mounted file system. ``upper`` is the one that an overlay writes to, if this process can see it."""

    type: str
    kind: Kind
    source: str
    mount_point: str
    options: tuple[str, ...]
    upper: FileSystem | None = None

    def __str__(self) -> str:
        # Values of options may contain hosts, users and directories, except on a disk.
        options = [option for option in self.options if self.kind == "disk" or "=" not in option]
        return f"{self.type} on {self.source} at {self.mount_point} ({','.join(options)})"


@dataclass(frozen=True)
class Link:
    """The bus of a drive, and its bytes per second in one direction, including protocol overhead."""

    name: str
    bytes_per_second: float

    def __str__(self) -> str:
        return f"{self.name}, {self.bytes_per_second / 1e9:.1f} GB/s"


@dataclass(frozen=True)
class Drive:
    """A block device: a whole disk, or a layer (RAID, LVM, encryption, loop) over ``members``. None: unknown.

    ``name`` is the kernel's. ``nbytes`` is its capacity; ``max_sectors_kb`` is the maximum KiB of one request,
    ``nr_requests`` the length of its queue. ``best_link`` is set if ``link`` is slower than the drive supports.
    """

    name: str
    layer: str | None = None
    members: tuple[Drive, ...] = ()
    transport: str | None = None
    model: str | None = None
    firmware: str | None = None
    nbytes: int | None = None
    link: Link | None = None
    best_link: Link | None = None
    numa_node: int | None = None
    rotational: bool | None = None
    scheduler: str | None = None
    max_sectors_kb: int | None = None
    nr_requests: int | None = None
    write_cache: str | None = None
    logical_block_size: int | None = None
    discard: bool | None = None

    @property
    def disks(self) -> tuple[Drive, ...]:
        """The disks at the bottom of the stack, without duplicates."""
        if not self.members:
            return (self,)
        return tuple({disk.name: disk for member in self.members for disk in member.disks}.values())

    @property
    def spins(self) -> bool:
        """Whether it is a rotating disk. Drives of a virtual machine say so whatever is behind them."""
        return bool(self.rotational) and not self.members and self.transport not in _VIRTUAL_TRANSPORTS

    @property
    def poses(self) -> str | None:
        """A description if the device is a file or memory, whose rates are those of memory; None for a disk."""
        if self.layer == "loop":
            return "a file that appears as a disk"
        return "memory that appears as a disk" if self.name.startswith(("zram", "ram")) else None

    @property
    def stack(self) -> Iterator[Drive]:
        """This device and all devices below it."""
        yield self
        for member in self.members:
            yield from member.stack

    def __str__(self) -> str:
        parts = [self.name, self.layer, self.model, self.firmware and f"firmware {self.firmware}"]
        if self.nbytes is not None:
            parts.append(
                f"{self.nbytes / 1e9:.3g} GB" if self.nbytes < 100e9 else f"{self.nbytes / 1e9:.0f} GB"
            )
        parts += [
            str(self.link) if self.link else self.transport,
            None if self.numa_node is None else f"NUMA node {self.numa_node}",
            self.scheduler and f"scheduler {self.scheduler}",
            None if self.max_sectors_kb is None else f"max_sectors_kb {self.max_sectors_kb}",
            self.write_cache and f"{self.write_cache} cache",
        ]
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True)
class Backing:
    """A directory's file system, and its block devices.

    There is usually one; several for btrfs or bcachefs on several devices; none for network file systems, memory and
    ZFS, or if a container hides them.
    """

    file_system: FileSystem
    drives: tuple[Drive, ...] = ()

    @property
    def disks(self) -> tuple[Drive, ...]:
        """The disks at the bottom of the stack, without duplicates."""
        return tuple({disk.name: disk for drive in self.drives for disk in drive.disks}.values())


def posing(backing: Backing) -> list[str]:
    """A text for each device below ``backing`` that is not a disk: "loop0 is a file that appears as a disk"."""
    return [
        f"{drive.name} is {drive.poses}"
        for top in backing.drives
        for drive in top.stack
        if drive.poses is not None
    ]


def behind(directory: Path, sysfs: Path = SYSFS, mountinfo: Path = MOUNTINFO) -> Backing:
    """The backing of ``directory``, which need not exist."""
    return _behind(directory, sysfs, _mounts(mountinfo), _MAX_LAYERS)


def io_counters(drive: Drive, sysfs: Path = SYSFS) -> tuple[int, int] | None:
    """Bytes that all processes have (read from, written to) the drive since it appeared; None if not counted.

    A layer counts its own traffic: a mirror half of the writes of its members, an LVM volume nothing of other volumes
    on the same disk.
    """
    fields = (text_of(sysfs / "class/block" / drive.name / "stat") or "").split()
    try:
        read_bytes, write_bytes = int(fields[2]) * SECTOR, int(fields[6]) * SECTOR
    except (IndexError, ValueError):
        return None
    # Two zeros mean that the kernel does not count: older kernels count for the paths of an NVMe drive only.
    return (read_bytes, write_bytes) if read_bytes or write_bytes else None


@dataclass(frozen=True)
class _Mount:
    # The device number, "major:minor".
    number: str
    point: Path
    type: str
    source: str
    options: tuple[str, ...]


def _mounts(mountinfo: Path) -> list[_Mount]:
    """The mounts, in the format of proc(5); malformed lines are skipped."""
    mounts = []
    for line in (text_of(mountinfo) or "").split("\n"):
        before, _, after = line.partition(" - ")
        mount, file_system = before.split(" "), after.split(" ")
        if len(mount) < 6 or len(file_system) < 3:
            continue
        options = [*mount[5].split(","), *_unescape(file_system[2]).split(",")]
        mounts.append(
            _Mount(
                number=mount[2],
                point=Path(_unescape(mount[4])),
                type=file_system[0],
                source=_unescape(file_system[1]),
                options=tuple(dict.fromkeys(option for option in options if option)),
            )
        )
    return mounts


def _unescape(field: str) -> str:
    """``field`` with octal escapes such as \\040 decoded."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _mount_of(directory: Path, mounts: list[_Mount]) -> _Mount | None:
    """The mount of ``directory``: the deepest one above it, or the last of several at the same place.

    Mounts with the directory's device number have priority, because a deeper mount may be hidden. Without such a mount
    (subvolumes of btrfs have other device numbers), only the path counts.
    """
    try:
        directory = directory.resolve()
        device = directory.stat().st_dev
        device_number = f"{os.major(device)}:{os.minor(device)}"
    except (OSError, RuntimeError):
        device_number = ""
    above = [mount for mount in mounts if directory.is_relative_to(mount.point)]
    own = [mount for mount in above if mount.number == device_number]
    candidates = own or above or [mount for mount in mounts if mount.number == device_number]
    return max(reversed(candidates), key=lambda mount: len(mount.point.parts), default=None)


def _kind(type_: str) -> Kind:
    if type_ in _MEMORY:
        return "memory"
    if type_ in _NETWORK or type_.startswith("fuse."):
        return "network"
    return "overlay" if type_ == "overlay" else "disk"


def _behind(directory: Path, sysfs: Path, mounts: list[_Mount], depth: int) -> Backing:
    mount = _mount_of(directory, mounts)
    if mount is None:
        return Backing(FileSystem("unknown", "unknown", "?", "?", ()))
    kind = _kind(mount.type)
    upper: Backing | None = None
    if kind == "overlay":
        upper_directories = [
            option.partition("=")[2] for option in mount.options if option.startswith("upperdir=")
        ]
        # The path may belong to another mount namespace, or be relative to the directory of the mount command.
        if (
            depth
            and upper_directories
            and Path(upper_directories[0]).is_absolute()
            and Path(upper_directories[0]).is_dir()
        ):
            upper = _behind(Path(upper_directories[0]), sysfs, mounts, depth - 1)
    file_system = FileSystem(
        mount.type,
        kind,
        mount.source,
        str(mount.point),
        mount.options,
        upper.file_system if upper else None,
    )
    if upper:
        return Backing(file_system, upper.drives)
    if kind != "disk":
        return Backing(file_system)
    stack = _Stack(sysfs, mounts)
    drives = (stack.drive(device, depth) for device in stack.devices_of(mount))
    return Backing(file_system, tuple(drive for drive in drives if drive is not None))


@dataclass(frozen=True)
class _Stack:
    """The stacks of block devices in one sysfs."""

    sysfs: Path
    mounts: list[_Mount]

    def devices_of(self, mount: _Mount) -> list[Path]:
        """The sysfs directories of the block devices of ``mount``."""
        numbered = self.sysfs / "dev/block" / mount.number
        if numbered.exists():
            return [numbered]
        # A file system with a virtual device number has a device as its source; bcachefs may have several.
        parts = mount.source.split(":/")
        sources = [mount.source] if len(parts) == 1 else [parts[0], *(f"/{name}" for name in parts[1:])]
        devices = [place for place in map(self._named, sources) if place is not None]
        if mount.type == "btrfs" and devices:
            for pool in listed(self.sysfs / "fs/btrfs"):
                names = [device.name for device in listed(pool / "devices")]
                if devices[0].name in names:
                    return [self.sysfs / "class/block" / name for name in names]
        return devices

    def _named(self, source: str) -> Path | None:
        """The block device ``source``: /dev/sda1, a link to it, or a name of device mapper."""
        if not source.startswith("/dev/"):
            return None
        for name in (Path(source).name, _target(source)):
            place = self.sysfs / "class/block" / name
            if name and place.exists():
                return place
        for place in listed(self.sysfs / "class/block"):
            if text_of(place / "dm/name") == Path(source).name:
                return place
        return None

    def drive(self, place: Path, depth: int) -> Drive | None:
        """The device at ``place``, or the whole disk of a partition, with its members."""
        try:
            place = place.resolve(strict=True)
        except (OSError, RuntimeError):
            return None
        if (place / "partition").exists():
            place = place.parent
        queue = place / "queue"
        nbytes = number(place / "size")
        link, best_link = _links(place)
        discard = number(queue / "discard_max_bytes")
        return Drive(
            name=place.name,
            layer=_layer(place),
            members=tuple(self._members(place, depth - 1)) if depth else (),
            transport=_transport(place),
            model=_model(place),
            firmware=text_of(place / "device/firmware_rev") or text_of(place / "device/rev"),
            nbytes=None if nbytes is None else nbytes * SECTOR,
            link=link,
            best_link=best_link,
            numa_node=_numa_node(place, self.sysfs),
            rotational=_flag(queue / "rotational"),
            scheduler=_chosen(text_of(queue / "scheduler")),
            max_sectors_kb=number(queue / "max_sectors_kb"),
            nr_requests=number(queue / "nr_requests"),
            write_cache=text_of(queue / "write_cache"),
            logical_block_size=number(queue / "logical_block_size"),
            discard=None if discard is None else discard > 0,
        )

    def _members(self, place: Path, depth: int) -> Iterator[Drive]:
        for member in listed(place / "slaves"):
            drive = self.drive(member, depth)
            if drive is not None:
                yield drive
        file = text_of(place / "loop/backing_file")
        if file is not None:
            yield from _behind(Path(file).parent, self.sysfs, self.mounts, depth).drives


def _layer(place: Path) -> str | None:
    if (place / "md").is_dir():
        return text_of(place / "md/level") or "md"
    if (place / "dm").is_dir():
        return _LAYERS.get((text_of(place / "dm/uuid") or "").partition("-")[0], "device mapper")
    return "loop" if (place / "loop").is_dir() else None


def _model(place: Path) -> str | None:
    model = text_of(place / "device/model") or text_of(place / "device/name")
    # A name on SCSI, "ATA" on SATA, a PCI number elsewhere.
    vendor = text_of(place / "device/vendor")
    if model is None or vendor is None or vendor == "ATA" or vendor.startswith("0x"):
        return model
    return f"{vendor} {model}"


def _controllers(place: Path) -> list[Path]:
    """The controllers of an NVMe drive. A drive with several paths is a child of its subsystem, which lists them."""
    if not place.name.startswith("nvme"):
        return []
    device = place / "device"
    if (device / "transport").exists():
        return [device]
    return [entry for entry in listed(device) if (entry / "transport").exists()]


def _origin(place: Path) -> Path:
    """The sysfs directory of the device's controller or bus."""
    controllers = _controllers(place)
    device = controllers[0] if controllers else place / "device"
    try:
        return device.resolve()
    except (OSError, RuntimeError):
        return place


def _transport(place: Path) -> str | None:
    controllers = _controllers(place)
    if controllers:
        return text_of(controllers[0] / "transport")
    parts = _origin(place).parts
    return next(
        (name for form, name in _TRANSPORTS if any(form.fullmatch(part) for part in parts)),
        None,
    )


def _links(place: Path) -> tuple[Link | None, Link | None]:
    """The link in use, and the fastest link that the drive supports if that is faster."""
    if controllers := _controllers(place):
        # Only for NVMe is the PCI device the drive itself; other drives share an adapter, or a hypervisor's device.
        function = controllers[0] / "device"
        link, best = (_pcie(function, speed) for speed in ("current", "max"))
        faster = link is not None and best is not None and best.bytes_per_second > link.bytes_per_second
        return link, best if faster else None
    port = next((above for above in _origin(place).parents if re.fullmatch(r"ata\d+", above.name)), None)
    speeds = sorted(port.glob("link*/ata_link/link*/sata_spd")) if port is not None else []
    match = re.fullmatch(r"(\d+(?:\.\d+)?) Gbps", (text_of(speeds[0]) or "") if speeds else "")
    # SATA encodes 8 bits of data as 10 bits.
    return (Link(f"SATA {match[1]} Gb/s", float(match[1]) * 1e9 / 10), None) if match else (None, None)


def _pcie(function: Path, prefix: str) -> Link | None:
    speed = re.match(r"(\d+(?:\.\d+)?) GT/s", text_of(function / f"{prefix}_link_speed") or "")
    lanes = number(function / f"{prefix}_link_width")
    if speed is None or lanes not in _PCIE_LANES or float(speed[1]) not in _PCIE:
        return None
    generation, data = _PCIE[float(speed[1])]
    return Link(f"PCIe {generation} x{lanes}", lanes * float(speed[1]) * 1e9 / 8 * data)


def _numa_node(place: Path, sysfs: Path) -> int | None:
    origin, root = _origin(place), sysfs.resolve()
    for above in (origin, *origin.parents):
        if above == root:
            break
        node = number(above / "numa_node")
        if node is not None:
            # -1: the firmware does not report a node.
            return node if node >= 0 else None
    return None


def _chosen(text: str | None) -> str | None:
    """The word in brackets, or the only word."""
    if text is None:
        return None
    match = re.search(r"\[([^\]]+)\]", text)
    if match:
        return match[1]
    return text if len(text.split()) == 1 else None


def _flag(path: Path) -> bool | None:
    return {"0": False, "1": True}.get(text_of(path) or "")


def _target(source: str) -> str:
    try:
        return Path(source).resolve().name
    except (OSError, RuntimeError):
        return ""
