"""How fast a machine is: the few rates from which ``forecast`` tells a step's time. Given, measured, or a profile's.

``measure.measure`` measures those of this machine, but for its device's, which ``zero3.observe.device_rates.measure``
does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Self

from tiering.errors import ConfigError


@dataclass(frozen=True)
class Rates:
    """What a node does in a second, in bytes unless named; None: it has no such thing, or nobody knows.

    NVMe, host memory and CPU are the whole node's, whatever the number of its ranks and paths; ``of_rank`` divides
    them. Link, network, device and the thread that sums are those of one rank.
    """

    nvme_read: float | None = None
    nvme_write: float | None = None
    nvme_mixed: float | None = None  # reads and writes together, at the same time and as many of each
    host_copy: float | None = None  # copied from one place of host memory to another
    host_memory: float | None = None  # read and written there by CPUs and links together
    device_link: float | None = None  # one way, host memory to the device or back
    device_link_both: float | None = None  # both ways at the same time, as much each way, together
    device_memory: float | None = None  # read from, or written to, the device's own memory
    optimizer: float | None = None  # elements that the CPU steps, in the state format of the plan
    gradients: float | None = None  # elements of gradients that the CPU adds to what is there, and squares
    flops: float | None = None  # of the device, on matrix products in the compute dtype: operations
    network: float | None = None  # that a rank sends, while it receives as many
    checksum: float | None = None  # summed by a rank's I/O thread, for ``verify``

    def __post_init__(self) -> None:
        for name, rate in asdict(self).items():
            number = isinstance(rate, int | float) and not isinstance(rate, bool)
            if rate is not None and not (number and math.isfinite(rate) and rate > 0):
                raise ConfigError(f"the rate {name!r} is {rate!r}: it has to be a number above 0, or None")

    def of_rank(self, local_ranks: int) -> Rates:
        """What each of ``local_ranks`` ranks of the node gets when all of them are at work."""

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
        )

    def updated(self, other: Rates) -> Rates:
        """These, with what ``other`` knows in their place."""
        return replace(self, **other.as_dict())

    def as_dict(self) -> dict[str, float]:
        """The rates that are known, by name."""
        return {name: rate for name, rate in asdict(self).items() if rate is not None}

    @classmethod
    def from_dict(cls, named: Mapping[str, float]) -> Self:
        """The reverse of ``as_dict``. Raises ConfigError for a name that is no rate."""
        unknown = named.keys() - {field.name for field in fields(cls)}
        if unknown:
            known = ", ".join(field.name for field in fields(cls))
            raise ConfigError(f"{sorted(unknown)[0]!r} is no rate; there are {known}")
        return cls(**named)

    def save(self, path: Path) -> None:
        """Write them as JSON."""
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """What ``save`` has written. Raises ConfigError if it is something else."""
        try:
            named = json.loads(path.read_text())
        except ValueError as error:
            raise ConfigError(f"the rates in {path} are no JSON ({error}); measure them again") from error
        if not isinstance(named, dict):
            raise ConfigError(f"the rates in {path} are no object of names and numbers; measure them again")
        return cls.from_dict(named)
