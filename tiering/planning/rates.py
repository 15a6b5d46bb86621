"""The rates of a machine from which ``forecast`` computes the time of a step: given, measured, or of a profile.

``measure.measure`` measures the rates of this machine; ``zero3.observe.device_rates.measure`` those of its device.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Self

from tiering.errors import ConfigError
from tiering.placement.workload import DiskRate

# Bytes per second that a drive is assumed to read and write together if nobody has measured it: one of PCIe 4.
ASSUMED_DISK = 5 * 10**9


@dataclass(frozen=True)
class Rates:
    """Rates of a node, in bytes per second unless another unit is named; None: absent or unknown.

    The rates of NVMe, host memory and CPU are those of the whole node, for all its ranks and paths; ``of_rank`` divides
    them. The rates of link, network and device are those of one rank.
    """

    nvme_read: float | None = None
    nvme_write: float | None = None
    # Total of reads and writes at the same time, as many of each.
    nvme_mixed: float | None = None
    # Bytes copied within host memory.
    host_copy: float | None = None
    # Bytes read and written in host memory by CPUs and links together.
    host_memory: float | None = None
    # One direction, between host memory and the device.
    device_link: float | None = None
    # Total of both directions at the same time, as many bytes each.
    device_link_both: float | None = None
    # Bytes read or written in the device's memory.
    device_memory: float | None = None
    # Elements per second that the CPU updates, in the state format of the plan.
    optimizer: float | None = None
    # Elements per second of gradients that the CPU accumulates and squares.
    gradients: float | None = None
    # Operations per second of the device, in matrix products in the compute dtype.
    flops: float | None = None
    # Bytes that a rank sends while it receives as many.
    network: float | None = None
    # Bytes that the CPUs checksum for ``verify``.
    checksum: float | None = None

    def __post_init__(self) -> None:
        for name, rate in asdict(self).items():
            number = isinstance(rate, int | float) and not isinstance(rate, bool)
            if rate is not None and not (number and math.isfinite(rate) and rate > 0):
                raise ConfigError(f"the rate {name!r} is {rate!r}; it must be a number above 0, or None")

    def of_rank(self, local_ranks: int) -> Rates:
        """The rates of each of ``local_ranks`` ranks of the node while all of them are active."""

        def share(rate: float | None) -> float | None:
            return None if rate is None else rate / local_ranks

        return replace(
            self,
            nvme_read=share(self.nvme_read),
            nvme_write=share(self.nvme_write),
            nvme_mixed=share(self.nvme_mixed),
            host_copy=share(self.host_copy),
            host_memory=share(self.host_memory),
            optimizer=share(self.optimizer),
            gradients=share(self.gradients),
            checksum=share(self.checksum),
        )

    def disk(self, paths: int, local_ranks: int) -> DiskRate:
        """The rate of reads and writes together of each of ``local_ranks`` ranks over ``paths``.

        Without the mixed rate, reads and writes take turns. Without these, each path has a drive of ASSUMED_DISK.
        """
        mixed = self.nvme_mixed
        if mixed is None and self.nvme_read is not None and self.nvme_write is not None:
            mixed = 2 / (1 / self.nvme_read + 1 / self.nvme_write)
        node = paths * ASSUMED_DISK if mixed is None else mixed
        return DiskRate(max(1, round(node / local_ranks)), mixed is None)

    def updated(self, other: Rates) -> Rates:
        """These rates, with the known rates of ``other`` in their place."""
        return replace(self, **other.as_dict())

    def as_dict(self) -> dict[str, float]:
        """The known rates by name."""
        return {name: rate for name, rate in asdict(self).items() if rate is not None}

    @classmethod
    def from_dict(cls, rates: Mapping[str, float]) -> Self:
        """The inverse of ``as_dict``. Raises ConfigError for an unknown name."""
        unknown = rates.keys() - {field.name for field in fields(cls)}
        if unknown:
            names = ", ".join(field.name for field in fields(cls))
            raise ConfigError(f"unknown rate {sorted(unknown)[0]!r}; the rates are {names}")
        return cls(**rates)

    def save(self, path: Path) -> None:
        """Writes the known rates to ``path`` as JSON."""
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a file of ``save``. Raises ConfigError if it has another format."""
        try:
            rates = json.loads(path.read_text())
        except ValueError as error:
            raise ConfigError(f"{path} is not valid JSON ({error}); measure the rates again") from error
        if not isinstance(rates, dict):
            raise ConfigError(f"{path} is not a JSON object of rates by name; measure the rates again")
        return cls.from_dict(rates)
