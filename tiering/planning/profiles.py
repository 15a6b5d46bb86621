"""Machines by name: rates from data sheets, for planning machines that you do not have.

Every figure is a manufacturer's peak, with its source; no machine trains at it. Matrix products of real layers reach
half of a GPU's peak more often than all of it, and a consumer drive writes at its peak only until its cache is full. So
a forecast from a profile is the shortest time that this hardware could take. ``measure.py`` measures your machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tiering.host.gpus import PEAK_FLOPS
from tiering.placement.workload import Workload
from tiering.planning.rates import Rates

GB = 1e9
TB = 1e12


@dataclass(frozen=True)
class Drive:
    """A drive: capacity in bytes, sequential reads and writes in bytes per second, and endurance in bytes written.

    The endurance is None if it is not published.
    """

    name: str
    capacity: int
    read: float
    write: float
    endurance: float | None


@dataclass(frozen=True)
class Device:
    """A GPU: dense operations per second in ``dtype`` with fp32 sums; bytes per second of its memory and of its link.

    The rate of the link is that of one direction. ``network`` is the rate at which it sends to other GPUs of its node,
    not to other nodes. ``dtype`` is the 16-bit dtype in which its matrix units compute.
    """

    name: str
    memory_bytes: int
    flops: float
    memory: float
    link: float
    network: float | None = None
    dtype: Literal["bf16", "fp16"] = "bf16"


@dataclass(frozen=True)
class Profile:
    """A node: its GPUs, host memory in bytes and in bytes per second, and its drives.

    ``fabric`` is the rate at which it sends to other nodes over all its adapters; None if it has none.
    """

    name: str
    device: Device
    devices: int
    host_bytes: int
    host_memory: float
    drive: Drive
    drives: int
    fabric: float | None = None

    def __str__(self) -> str:
        memory = f"{self.host_bytes >> 30} GiB of RAM"
        return f"{self.devices} x {self.device.name}, {memory}, {self.drives} x {self.drive.name}"

    @property
    def nvme_bytes(self) -> int:
        """Bytes of all drives together."""
        return self.drives * self.drive.capacity

    @property
    def endurance(self) -> float | None:
        """Bytes that may be written to all drives together."""
        return None if self.drive.endurance is None else self.drives * self.drive.endurance

    def network(self, nodes: int) -> float | None:
        """Bytes per second that a rank sends to all others on ``nodes`` nodes.

        What comes from other nodes enters a node once, over all of its adapters, and goes on between its GPUs.
        """
        if nodes == 1:
            return self.device.network
        rates = self.fabric, self.device.network if self.devices > 1 else self.fabric
        return None if None in rates else min(rate for rate in rates if rate is not None)

    def rates(self, load: Workload, *, nodes: int = 1) -> Rates:
        """The rates for ``load``. Memory bounds the CPU kernels: its bandwidth divided by the bytes per element."""
        return Rates(
            nvme_read=self.drives * self.drive.read,
            nvme_write=self.drives * self.drive.write,
            host_copy=self.host_memory / 2,
            host_memory=self.host_memory,
            optimizer=self.host_memory / load.stepped_bytes,
            gradients=self.host_memory / (load.sent_itemsize + load.grad_itemsize),
            flops=self.device.flops,
            device_memory=self.device.memory,
            device_link=self.device.link,
            network=self.network(nodes),
        )


# samsung.com, 990 PRO 2TB: 7,450 and 6,900 MB/s, 1,200 TBW.
SSD_990_PRO = Drive("990 PRO 2TB", 2 * 10**12, 7.45 * GB, 6.9 * GB, 1200 * TB)
# Samsung PM9D3a 7.68TB (PCIe 5): 12,000 and 6,800 MB/s, 14,016 TBW (one drive write a day for five years).
PM9D3A = Drive("PM9D3a 7.68TB", 7_680 * 10**9, 12.0 * GB, 6.8 * GB, 14016 * TB)

# NVIDIA's DGX-2 data sheet: eight drives of 3.84 TB. The ZeRO-Infinity paper (arXiv 2104.07857) has 25 GB/s for all of
# them together, here in both directions. Their endurance is not published.
NVME_OF_DGX_2 = Drive("NVMe 3.84TB", 3_840 * 10**9, 25 * GB / 8, 25 * GB / 8, None)

# NVIDIA's Ada whitepaper: 165.2 TFLOPS of bf16 with fp32 sums, 1,008 GB/s; PCIe 4.0 x16: 32 GB/s each way.
RTX_4090 = Device("RTX 4090", 24 << 30, PEAK_FLOPS["RTX 4090"], 1008 * GB, 32 * GB)
# NVIDIA's A100 80GB data sheet (SXM): 312 TFLOPS, 2,039 GB/s, PCIe 4.0: 64 GB/s both ways, NVLink 600 both ways.
A100 = Device("A100 80GB", 80 << 30, PEAK_FLOPS["A100"], 2039 * GB, 32 * GB, 300 * GB)
# NVIDIA's H100 data sheet (SXM): 989 TFLOPS dense, 3.35 TB/s, PCIe 5.0: 128 GB/s both ways, NVLink 900 both ways.
H100 = Device("H100 80GB", 80 << 30, PEAK_FLOPS["H100"], 3350 * GB, 64 * GB, 450 * GB)

# NVIDIA's V100 data sheet (SXM): 125 TFLOPS of fp16, 900 GB/s, NVLink 300 GB/s both ways. PCIe 3.0: 16 GB/s each way.
V100 = Device("V100 32GB", 32 << 30, PEAK_FLOPS["V100"], 900 * GB, 16 * GB, 150 * GB, dtype="fp16")

DDR5_5600_CHANNEL = 5600e6 * 8  # transfers per second x bytes
DDR4_3200_CHANNEL = 3200e6 * 8
DDR4_2666_CHANNEL = 2666e6 * 8
DDR5_4800_CHANNEL = 4800e6 * 8

PROFILES = {
    profile.name: profile
    for profile in (
        # A desktop: two channels.
        Profile("rtx4090", RTX_4090, 1, 64 << 30, 2 * DDR5_5600_CHANNEL, SSD_990_PRO, 2),
        # A server of one socket with eight channels, as EPYC 7003.
        Profile("a100", A100, 1, 256 << 30, 8 * DDR4_3200_CHANNEL, PM9D3A, 2),
        # As a DGX H100: two Xeons of eight channels and 2 TiB, 8 data drives, 8 adapters of 400 Gb/s.
        Profile("8xh100", H100, 8, 2 << 40, 16 * DDR5_4800_CHANNEL, PM9D3A, 8, fabric=400 * GB),
        # A DGX-2: two Xeons of six channels and 1.5 TB, 8 data drives, 8 adapters of 100 Gb/s.
        Profile("dgx2", V100, 16, 1536 << 30, 12 * DDR4_2666_CHANNEL, NVME_OF_DGX_2, 8, fabric=100 * GB),
    )
}


def like(gpu_memory: int, devices: int) -> Profile | None:
    """The profile whose GPUs have ``gpu_memory`` bytes, and of several the one with about as many ``devices``."""
    alike = [each for each in PROFILES.values() if each.device.memory_bytes == gpu_memory]
    return min(alike, key=lambda each: abs(each.devices - devices), default=None)
