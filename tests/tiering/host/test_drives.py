"""What is behind a directory, on machines that are not here: their sysfs and mounts, written under tmp_path."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from tiering.host.drives import Backing, Drive, FileSystem, Link, behind, io_counters

QUEUE = {
    "rotational": "0",
    "scheduler": "[none] mq-deadline kyber",
    "max_sectors_kb": "128",
    "nr_requests": "1023",
    "write_cache": "write through",
    "logical_block_size": "512",
    "discard_max_bytes": "2199023255040",
}
TOLD = {
    "rotational": False,
    "scheduler": "none",
    "max_sectors_kb": 128,
    "nr_requests": 1023,
    "write_cache": "write through",
    "logical_block_size": 512,
    "discard": True,
}
STAT = "  10 0 {read} 5 20 0 {written} 7 0 9 12 0 0 0 0 0 0"


class Machine:
    """A sysfs and a table of mounts, to which devices and mounts are added. ``data`` is a directory to ask about."""

    def __init__(self, root: Path) -> None:
        self.sysfs = root / "sys"
        self.mountinfo = root / "mountinfo"
        self.data = root / "my data"
        self.data.mkdir()
        self.mountinfo.write_text("")

    def write(self, directory: str, files: dict[str, str]) -> Path:
        place = self.sysfs / directory
        for name, text in files.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(f"{text}\n")
        return place

    def link(self, name: str, target: Path) -> None:
        (self.sysfs / name).parent.mkdir(parents=True, exist_ok=True)
        (self.sysfs / name).symlink_to(target)

    def device(self, directory: str, number: str, files: dict[str, str] | None = None) -> Path:
        place = self.write(directory, {"size": "2000", **(files or {})})
        self.link(f"dev/block/{number}", place)
        self.link(f"class/block/{place.name}", place)
        return place

    def disk(self, directory: str, number: str, files: dict[str, str] | None = None) -> Path:
        queue = {f"queue/{name}": text for name, text in QUEUE.items()}
        return self.device(directory, number, queue | (files or {}))

    def nvme(self, index: int = 0, *, speed: str = "32.0 GT/s PCIe", lanes: str = "4") -> Path:
        """An NVMe drive on PCIe: the function, its controller, and the namespace as a disk."""
        function = self.write(
            f"devices/pci0000:00/0000:0{index}:00.0",
            {
                "current_link_speed": speed,
                "current_link_width": lanes,
                "max_link_speed": "32.0 GT/s PCIe",
                "max_link_width": "4",
                "numa_node": str(index),
            },
        )
        controller = f"{function.relative_to(self.sysfs)}/nvme/nvme{index}"
        self.write(
            controller,
            {
                "model": "SAMSUNG MZWLO3T8HCLS-00A07              ",
                "firmware_rev": "OPPA1B5Q",
                "serial": "S7PYNE0W400000",
                "transport": "pcie",
            },
        )
        self.link(f"{controller}/device", function)
        disk = self.disk(f"{controller}/nvme{index}n1", f"259:{index}", {"size": "7501476528"})
        self.link(f"{controller}/nvme{index}n1/device", self.sysfs / controller)
        return disk

    def mount(self, line: str) -> None:
        """As in /proc/self/mountinfo, after the two numbers of the mount; DATA is the directory to ask about."""
        with self.mountinfo.open("a") as table:
            table.write(f"31 22 {line.replace('DATA', str(self.data).replace(' ', chr(92) + '040'))}\n")

    def behind(self, directory: Path | None = None) -> Backing:
        return behind(directory or self.data, self.sysfs, self.mountinfo)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_an_nvme_drive_with_its_link(machine: Machine) -> None:
    disk = machine.nvme(1)
    machine.device(f"{disk.relative_to(machine.sysfs)}/nvme1n1p2", "259:7", {"partition": "2"})
    machine.mount("259:7 / DATA rw,noatime shared:1 master:2 - xfs /dev/nvme1n1p2 rw,noatime,logbsize=256k")
    machine.mount("7777:1 / / rw - ext4 /dev/sda1 rw")
    backing = machine.behind(machine.data / "deeper" / "not there yet")
    assert backing.file_system == FileSystem(
        "xfs", "disk", "/dev/nvme1n1p2", str(machine.data), ("rw", "noatime", "logbsize=256k")
    )
    (drive,) = backing.drives
    assert drive == Drive(
        "nvme1n1",
        transport="pcie",
        model="SAMSUNG MZWLO3T8HCLS-00A07",
        firmware="OPPA1B5Q",
        nbytes=7501476528 * 512,
        link=Link("PCIe 5.0 x4", pytest.approx(4 * 32e9 / 8 * 128 / 130)),
        numa_node=1,
        **TOLD,
    )
    assert str(drive) == (
        "nvme1n1, SAMSUNG MZWLO3T8HCLS-00A07, firmware OPPA1B5Q, 3841 GB, PCIe 5.0 x4, 15.8 GB/s, NUMA node 1,"
        " scheduler none, max_sectors_kb 128, write through cache"
    )
    assert drive.disks == backing.disks == (drive,)
    assert "S7PYNE0W400000" not in json.dumps(asdict(backing))


@pytest.mark.parametrize(
    ("speed", "lanes", "link", "best"),
    [
        ("16.0 GT/s PCIe", "4", "PCIe 4.0 x4, 7.9 GB/s", "PCIe 5.0 x4, 15.8 GB/s"),
        ("8 GT/s", "2", "PCIe 3.0 x2, 2.0 GB/s", "PCIe 5.0 x4, 15.8 GB/s"),  # as older kernels write it
        ("Unknown", "4", "None", "None"),
        ("32.0 GT/s PCIe", "255", "None", "None"),
    ],
)
def test_a_link_below_what_the_drive_can_do(
    machine: Machine, speed: str, lanes: str, link: str, best: str
) -> None:
    machine.nvme(speed=speed, lanes=lanes)
    machine.mount("259:0 / DATA rw - ext4 /dev/nvme0n1 rw")
    (drive,) = machine.behind().drives
    assert (str(drive.link), str(drive.best_link)) == (link, best)


def test_an_nvme_drive_that_hangs_on_its_subsystem(machine: Machine) -> None:
    controller = machine.nvme().parent
    (machine.sysfs / "dev/block/259:0").unlink()  # that path is hidden; the drive is a child of the subsystem
    subsystem = machine.write(
        "devices/virtual/nvme-subsystem/nvme-subsys0",
        {"model": "Micron_7450", "firmware_rev": "E2MU200\r"},
    )
    machine.link(f"{subsystem.relative_to(machine.sysfs)}/nvme0", controller)
    (machine.sysfs / "class/block/nvme0n1").unlink()
    disk = machine.disk(f"{subsystem.relative_to(machine.sysfs)}/nvme0n1", "259:0")
    (disk / "device").symlink_to(subsystem)
    machine.mount("259:0 / DATA rw - ext4 /dev/nvme0n1 rw")
    (drive,) = machine.behind().drives
    assert (drive.model, drive.firmware, drive.transport) == ("Micron_7450", "E2MU200", "pcie")
    assert str(drive.link) == "PCIe 5.0 x4, 15.8 GB/s"
    assert drive.numa_node == 0


def test_sata_virtio_and_a_raid_controller(machine: Machine) -> None:
    port = "devices/pci0000:00/0000:00:17.0/ata5"
    machine.write(port, {"link5/ata_link/link5/sata_spd": "6.0 Gbps", "../numa_node": "-1"})
    scsi = machine.write(
        f"{port}/host4/target4:0:0/4:0:0:0",
        {"model": "CT4000MX500SSD1 ", "vendor": "ATA     ", "rev": "046 "},
    )
    disk = machine.disk(f"{scsi.relative_to(machine.sysfs)}/block/sda", "8:0")
    (disk / "device").symlink_to(scsi)
    machine.mount("8:0 / DATA rw - ext4 /dev/sda rw")
    (sata,) = machine.behind().drives
    assert (sata.model, sata.firmware, sata.transport, sata.numa_node) == (
        "CT4000MX500SSD1",
        "046",
        "sata",
        None,
    )
    assert str(sata.link) == "SATA 6.0 Gb/s, 0.6 GB/s"

    virtio = machine.write(
        "devices/pci0000:00/0000:00:02.0/virtio1", {"vendor": "0x1af4", "../numa_node": "0"}
    )
    disk = machine.disk(
        f"{virtio.relative_to(machine.sysfs)}/block/vda",
        "7777:0",
        {"queue/scheduler": "none [mq-deadline] kyber bfq", "size": "what", "queue/rotational": "2"},
    )
    (disk / "device").symlink_to(virtio)
    machine.mount("7777:0 / DATA rw - ext4 /dev/vda rw")  # over the other: what is mounted last is seen
    assert machine.behind().drives == (
        Drive(
            "vda",
            transport="virtio",
            numa_node=0,
            **(TOLD | {"scheduler": "mq-deadline", "rotational": None}),
        ),
    )

    scsi = machine.write(
        "devices/pci0000:80/0000:81:00.0/host0/target0:2:0/0:2:0:0", {"model": "PERC H740P", "vendor": "DELL"}
    )
    disk = machine.disk(f"{scsi.relative_to(machine.sysfs)}/block/sdb", "8:16")
    (disk / "device").symlink_to(scsi)
    machine.mount("8:16 / DATA rw - ext4 /dev/sdb rw")
    (raid,) = machine.behind().drives
    assert (raid.model, raid.link, raid.transport) == ("DELL PERC H740P", None, None)


def test_a_stack_is_told_down_to_its_disks(machine: Machine) -> None:
    """Encryption on LVM on RAID 0 of a whole drive and a partition."""
    first, second = machine.nvme(0), machine.nvme(1)
    part = machine.device(f"{second.relative_to(machine.sysfs)}/nvme1n1p1", "259:9", {"partition": "1"})
    raid = machine.device(
        "devices/virtual/block/md0", "9:0", {"md/level": "raid0", "stat": STAT.format(read=8, written=6)}
    )
    volume = machine.device(
        "devices/virtual/block/dm-0", "253:0", {"dm/uuid": "LVM-abc", "dm/name": "vg-swap"}
    )
    crypt = machine.device("devices/virtual/block/dm-1", "253:1", {"dm/uuid": "CRYPT-LUKS2-01-swap"})
    for upper, lower in [(raid, first), (raid, part), (volume, raid), (crypt, volume)]:
        machine.link(f"{upper.relative_to(machine.sysfs)}/slaves/{lower.name}", lower)
    machine.mount("253:1 / DATA rw - ext4 /dev/mapper/swap rw")
    backing = machine.behind()
    (drive,) = backing.drives
    layers = []
    while drive.members:
        layers.append((drive.name, drive.layer))
        drive = drive.members[0]
    assert layers == [("dm-1", "crypt"), ("dm-0", "LVM"), ("md0", "raid0")]
    assert [disk.name for disk in backing.disks] == ["nvme0n1", "nvme1n1"]
    assert [disk.numa_node for disk in backing.disks] == [0, 1]
    assert io_counters(backing.drives[0].members[0].members[0], machine.sysfs) == (4096, 3072)
    assert io_counters(backing.disks[0], machine.sysfs) is None
    machine.write(f"{first.relative_to(machine.sysfs)}", {"stat": STAT.format(read=0, written=0)})
    assert io_counters(backing.disks[0], machine.sysfs) is None


def test_a_mount_that_lies_hidden_under_another_is_not_meant(machine: Machine) -> None:
    device = machine.data.stat().st_dev
    machine.mount("7777:1 / DATA rw - ext4 /dev/hidden rw")
    machine.mount(f"{os.major(device)}:{os.minor(device)} / / rw - xfs /dev/seen rw")
    assert machine.behind().file_system.source == "/dev/seen"


def test_a_loop_in_a_stack_ends(machine: Machine) -> None:
    device = machine.device("devices/virtual/block/dm-0", "253:0")
    machine.link("devices/virtual/block/dm-0/slaves/dm-0", device)
    machine.mount("253:0 / DATA rw - ext4 /dev/dm-0 rw")
    assert [disk.name for disk in machine.behind().disks] == ["dm-0"]


def test_btrfs_over_two_drives_is_found_by_its_source(machine: Machine) -> None:
    for disk in (machine.nvme(0), machine.nvme(1)):
        machine.link(f"fs/btrfs/8b2e/devices/{disk.name}", disk)
    machine.mount("0:44 /@scratch DATA rw,relatime - btrfs /dev/nvme1n1 rw,compress=zstd:3,subvol=/@scratch")
    assert [drive.name for drive in machine.behind().drives] == ["nvme0n1", "nvme1n1"]


def test_other_sources_of_file_systems_that_invent_their_number(machine: Machine) -> None:
    machine.nvme(0)
    machine.nvme(1)
    machine.device("devices/virtual/block/dm-3", "253:3", {"dm/name": "vg-swap"})
    for source, names in [
        ("/dev/nvme0n1:/dev/nvme1n1", ["nvme0n1", "nvme1n1"]),
        ("/dev/mapper/vg-swap", ["dm-3"]),
        ("tank/scratch", []),
        ("/dev/gone", []),
    ]:
        machine.mount(f"0:50 / DATA rw - bcachefs {source} rw")
        assert [drive.name for drive in machine.behind().drives] == names


def test_an_overlay_has_its_upper_directorys_drive(machine: Machine, tmp_path: Path) -> None:
    machine.nvme()
    upper = tmp_path / "upper"
    upper.mkdir()
    machine.mount(f"0:60 / DATA rw - overlay overlay rw,lowerdir=/l1:/l2,upperdir={upper},workdir=/w")
    machine.mount(f"259:0 / {tmp_path} rw - ext4 /dev/nvme0n1 rw")
    backing = machine.behind()
    assert backing.file_system.kind == "overlay"
    assert backing.file_system.upper == FileSystem("ext4", "disk", "/dev/nvme0n1", str(tmp_path), ("rw",))
    assert [drive.name for drive in backing.drives] == ["nvme0n1"]
    assert str(backing.file_system) == f"overlay on overlay at {machine.data} (rw)"
    upper.rmdir()  # a container does not see it
    assert machine.behind().file_system.upper is None
    assert machine.behind().drives == ()


@pytest.mark.parametrize(
    ("number", "mounted", "kind"),
    [
        ("0:70", "nfs4 server:/export rw,vers=4.2,clientaddr=10.0.0.1", "network"),
        ("0:71", "fuse.sshfs me@host:/ rw,user_id=0", "network"),
        ("0:72", "virtiofs shared rw", "network"),
        ("0:73", "tmpfs none rw,size=4k", "memory"),
    ],
)
def test_no_drive_is_behind_networks_and_memory(
    machine: Machine, number: str, mounted: str, kind: str
) -> None:
    machine.mount(f"{number} / DATA rw,relatime - {mounted}")
    backing = machine.behind()
    assert (backing.file_system.kind, backing.drives) == (kind, ())
    assert str(backing.file_system).endswith("(rw,relatime)")


def test_nothing_told_is_nothing_found(machine: Machine, tmp_path: Path) -> None:
    nothing = Backing(FileSystem("unknown", "unknown", "?", "?", ()))
    assert machine.behind() == nothing
    assert behind(machine.data, tmp_path / "none", tmp_path / "none") == nothing
    machine.mount("odd")
    machine.mount("8:99 / DATA rw - ext4 /dev/sdz rw")
    assert machine.behind().drives == ()
    place = machine.device("devices/odd/sdz", "8:99")
    (place / "size").write_bytes(b"\xff\xfe\x00")
    (place / "queue/scheduler").mkdir(parents=True)
    (place / "device").symlink_to(place / "device")
    assert machine.behind().drives == (Drive("sdz"),)


def test_here(tmp_path: Path) -> None:
    backing = behind(tmp_path)
    assert backing.file_system.kind != "unknown"
    assert tmp_path.resolve().is_relative_to(backing.file_system.mount_point)
    for drive in backing.drives:
        counted = io_counters(drive)
        assert counted is None or min(counted) >= 0
