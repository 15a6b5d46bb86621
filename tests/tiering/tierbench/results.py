"""Results as drives of several kinds would give them."""

from __future__ import annotations

import math
from typing import Any

from tiering.host.drives import Backing, Drive, FileSystem, Link
from tiering.tierbench.result import (
    Engine,
    Latencies,
    Machine,
    PathRow,
    Result,
    Row,
    Sample,
    Settings,
    StepVerdict,
    Sustained,
    Target,
    Traffic,
)
from tiering.tierbench.words import ReadWrite

MIB = 1 << 20


def latencies(p50: float) -> Latencies:
    return Latencies(p50=p50, p95=1.4 * p50, p99=1.9 * p50, p999=3.2 * p50, max=7.7 * p50)


def traffic(nbytes: int, bs: int, p50: float) -> Traffic:
    return Traffic(bytes=nbytes, ops=nbytes // bs, latency=latencies(p50)) if nbytes else Traffic()


def row(
    rw: ReadWrite,
    *,
    read: float = 0.0,
    write: float = 0.0,
    directories: tuple[str, ...] = ("/mnt/nvme0/swap",),
    bs: int = MIB,
    seconds: float = 2.5,
    complete: bool = True,
) -> Row:
    """A window at about these rates, shared evenly by the directories; its latencies follow from a depth of 16."""
    shares = len(directories)
    blocks = [int(rate * seconds) // bs // shares for rate in (read, write)]
    times = [16 * bs * shares / rate if rate else 0.0 for rate in (read, write)]
    parts = [traffic(count * bs, bs, time) for count, time in zip(blocks, times, strict=True)]
    whole = [traffic(count * bs * shares, bs, time) for count, time in zip(blocks, times, strict=True)]
    wave = [1 + 0.12 * math.sin(index) for index in range(1, int(seconds * 10) + 1)]
    return Row(
        rw=rw,
        seconds=seconds,
        read=whole[0],
        write=whole[1],
        cpu_seconds=0.0175 * (read + write) * seconds / 1e9,
        worst_second=0.94 * (read + write) if seconds > 1 else None,
        samples=tuple(
            Sample(at=0.1 * (index + 1), read=read * height, write=write * height)
            for index, height in enumerate(wave)
        ),
        paths=tuple(PathRow(directory=name, read=parts[0], write=parts[1]) for name in directories),
        complete=complete,
    )


def nvme(index: int = 0, *, slow_slot: bool = False) -> Drive:
    best = Link("PCIe 5.0 x4", 15.75e9)
    return Drive(
        name=f"nvme{index}n1",
        transport="pcie",
        model="SAMSUNG MZWLO3T8HCLS-00A07",
        firmware="OPPA1B5Q",
        nbytes=3_840_755_982_336,
        link=Link("PCIe 4.0 x4", 7.88e9) if slow_slot else best,
        best_link=best if slow_slot else None,
        numa_node=index % 2,
        rotational=False,
        scheduler="none",
        max_sectors_kb=128,
        nr_requests=1023,
        write_cache="write through",
        logical_block_size=512,
        discard=True,
    )


def on(drive: Drive, mount_point: str, type_: str = "xfs") -> Backing:
    return Backing(FileSystem(type_, "disk", f"/dev/{drive.name}", mount_point, ("rw", "noatime")), (drive,))


def target(directory: str, backing: Backing, **more: Any) -> Target:
    return Target(directory=directory, backing=backing, free_bytes=1_234 << 30, **more)


def config(*directories: str) -> dict[str, Any]:
    offload = {"device": "nvme", "nvme_path": directories[0] if len(directories) == 1 else list(directories)}
    return {
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        "tiering": {"io": {"engine": "auto", "block_size": "1MiB", "queue_depth": 16, "registered": True}},
    }


def result(**changed: Any) -> Result:
    """That of one NVMe drive, as it is bought today."""
    usual: dict[str, Any] = {
        "version": "0.1.0",
        "date": "2026-11-22T13:37:00+00:00",
        "command": "tierbench /mnt/nvme0/swap",
        "machine": Machine(
            cpu="AMD EPYC 9575F 64-Core Processor", cpus=128, memory_bytes=1 << 40, kernel="Linux 6.18.5"
        ),
        "targets": (
            target("/mnt/nvme0/swap", on(nvme(), "/mnt/nvme0"), others_read=81 * MIB, others_written=9 * MIB),
        ),
        "settings": Settings(bs=MIB, iodepth=16, size=4 << 30, runtime=2.5),
        "engine": Engine(
            ioengine="io_uring",
            flags=("registered_buffers", "registered_files", "single_issuer", "defer_taskrun"),
        ),
        "rows": (
            row("read", read=13.42e9),
            row("write", write=7.087e9),
            row("rw", read=4.961e9, write=4.958e9),
        ),
        "written_bytes": 37_400_000_000,
        "read_bytes": 46_000_000_000,
        "verdict": StepVerdict(
            params=6_738_415_616,
            state="fp32",
            read_bytes=80_860_987_392,
            write_bytes=94_337_818_624,
            seconds=17.66,
            bound="writes",
            written_per_day=399_200_000_000_000,
        ),
        "config": config("/mnt/nvme0/swap"),
    }
    return Result(**(usual | changed))


NVME = result()

VIRTIO = result(
    targets=(
        target(
            "/data",
            on(
                Drive(
                    name="vda",
                    transport="virtio",
                    nbytes=274_877_906_944,
                    rotational=True,
                    scheduler="mq-deadline",
                    max_sectors_kb=4096,
                    write_cache="write back",
                ),
                "/",
                "ext4",
            ),
            others_read=3_100_000_000,
            others_written=12 * MIB,
        ),
    ),
    engine=Engine(
        ioengine="libaio",
        flags=(),
        passed_over={"io_uring": "Operation not permitted", "registered_buffers": "Operation not supported"},
    ),
    rows=(
        row("read", read=1.21e9, directories=("/data",)),
        row("randread", read=0.0512e9, bs=4096, directories=("/data",)),
        row("randrw", read=0.031e9, write=0.013e9, bs=4096, directories=("/data",)),
    ),
    verified_bytes=8_000_000_000,
    verdict=None,
    config=config("/data"),
)

PATHS = ("/mnt/nvme0/swap", "/mnt/nvme1/swap")

LONG_WRITE = row("write", write=2.32e9, directories=PATHS, seconds=60.0).model_copy(
    update={
        "worst_second": 2.02e9,
        "samples": tuple(
            Sample(
                at=0.1 * index,
                read=0.0,
                write=(6.1e9 if index <= 33 else 2.1e9) * (1 + 0.05 * math.sin(index)),
            )
            for index in range(1, 601)
        ),
    }
)
"""Of --sustained: the write cache is full after 3.3 seconds and 20 GB."""

TWO = result(
    targets=(
        target(
            PATHS[0],
            Backing(
                FileSystem("ext4", "disk", "/dev/md0", "/mnt/nvme0", ("rw",)),
                (Drive("md0", layer="raid0", members=(nvme(0), nvme(2), nvme(4))),),
            ),
        ),
        target(PATHS[1], on(nvme(1, slow_slot=True), "/mnt/nvme1")),
    ),
    rows=(
        LONG_WRITE,
        row("read", read=20.3e9, directories=PATHS),
        row("write", write=11.8e9, directories=PATHS),
        row("rw", read=8.1e9, write=8.0e9, directories=PATHS),
    ),
    sustained=Sustained(
        burst=6.1e9,
        sustained=2.1e9,
        cached_bytes=20_000_000_000,
        written_bytes=LONG_WRITE.write.bytes,
    ),
    notes=(
        "/mnt/nvme1/swap: nvme1n1 is linked by PCIe 4.0 x4, 7.9 GB/s, although it can PCIe 5.0 x4, 15.8 GB/s",
    ),
    config=config(*PATHS),
)

BUFFERED = result(
    targets=(
        target(
            "/mnt/nvme0/swap",
            Backing(
                FileSystem(
                    "overlay",
                    "overlay",
                    "overlay",
                    "/",
                    ("rw",),
                    upper=FileSystem("ext4", "disk", "/dev/nvme0n1", "/var", ("rw",)),
                ),
                (nvme(),),
            ),
        ),
    ),
    settings=NVME.settings.model_copy(update={"direct": False}),
    verdict=None,
    config={},
    notes=("buffered figures include the page cache: no verdict for training",),
)

INTERRUPTED = result(
    rows=(row("read", read=13.42e9), row("write", write=7.1e9, seconds=0.7, complete=False)),
    verdict=None,
    interrupted=True,
)

BARE = result(
    targets=(target("/odd [name] $^$\x1b[2J", Backing(FileSystem("unknown", "unknown", "?", "?", ()))),),
    engine=Engine(ioengine="threads", flags=()),
    rows=(),
    written_bytes=0,
    read_bytes=0,
    verdict=None,
    config={},
)
"""Nothing known of the drive, nothing measured, and a name that a terminal, rich and matplotlib would act on."""

ALL = (NVME, VIRTIO, TWO, BUFFERED, INTERRUPTED, BARE)
