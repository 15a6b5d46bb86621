"""Homes: the places where flat arrays of bytes live on the tiers, and the directories of those on NVMe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from tiering.placement.plan import Plan
from tiering.placement.tenants import SNAPSHOTS
from tiering.placement.workload import Tier
from tiering.storage.read_only import HomeInFiles, Move
from tiering.storage.striped_extent import StripedExtent
from tiering.storage.swap_space import Section
from tiering.storage.versions import Kept


@dataclass
class Home:
    """The place of a flat array of bytes: memory (a uint8 tensor), an extent of swap space, or files of a user.

    The bytes of ``files`` are only read: they never change.
    """

    tensor: Tensor | None = None
    extent: StripedExtent | None = None
    on_device: bool = False  # in the memory of a GPU
    # In the extent. 0 for ``length``: all of it.
    offset: int = 0
    length: int = 0
    files: HomeInFiles | None = None

    @property
    def on_nvme(self) -> bool:
        """Whether the bytes have to be read into memory."""
        return self.tensor is None

    @property
    def in_snapshots(self) -> bool:
        """Whether a snapshot has the bytes where they are."""
        return self.extent is not None and Kept.SNAPSHOT in self.extent.kept

    @property
    def room(self) -> int:
        """Bytes of memory that a read of the whole home needs: see Note [A read lands shifted] in read_only.py."""
        if self.files is not None:
            return self.files.nbytes + self.files.slack
        assert self.extent is not None
        return self.length or self.extent.nbytes

    @property
    def slack(self) -> int:
        """The part of ``room`` beyond the bytes of the home."""
        return 0 if self.files is None else self.files.slack

    def landed(self, nbytes: int) -> Sequence[Move]:
        """Where bytes [0, nbytes) are in memory after a read of the whole home, and where they belong."""
        return (Move(0, 0, nbytes),) if self.files is None else self.files.layout.moves

    @property
    def address(self) -> int:
        """Address of the first byte in host memory; 0 if the bytes are not in host memory."""
        return 0 if self.tensor is None or self.on_device else self.tensor.data_ptr()

    def part(self, pages: range) -> Home:
        """The home of some of the bytes, whole pages."""
        if self.tensor is not None:
            return Home(self.tensor[pages.start : pages.stop], on_device=self.on_device)
        if self.files is not None:
            return Home(files=self.files.part(pages.start, pages.stop))
        return Home(extent=self.extent, offset=self.offset + pages.start, length=len(pages))

    @property
    def on_host(self) -> bool:
        """Whether the CPU can address the bytes."""
        return self.tensor is not None and not self.on_device


@dataclass(frozen=True)
class NvmePaths:
    """Directories of the swap space: of offload_param for parameters, of offload_optimizer for everything else."""

    param: tuple[Path, ...] = ()
    optimizer: tuple[Path, ...] = ()

    @property
    def all(self) -> tuple[Path, ...]:
        """All directories, each one once."""
        return tuple(dict.fromkeys((*self.param, *self.optimizer)))

    def sections(self, plan: Plan) -> dict[str, Section]:
        """The bytes and the directories of each tenant on NVMe."""
        sections, on_nvme = {}, plan.contents(Tier.NVME)
        for tenant in plan.tenants:
            if nbytes := on_nvme.get(tenant.kind):
                paths = self.param if tenant.with_parameters else self.optimizer
                assert paths, "a plan uses NVMe only where the configuration names a path"
                sections[tenant.kind] = Section(nbytes, paths)
        if nbytes := on_nvme.get(SNAPSHOTS):
            sections[SNAPSHOTS] = Section(nbytes, self.optimizer or self.param)
        return sections
