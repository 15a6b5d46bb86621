"""ParamGroup: parameters that are unsharded and resharded together.

Note [A resharded parameter points nowhere]
    Reading freed memory through a parameter would end the process. While its group is resharded a parameter therefore
    holds one NaN expanded to its shape: reads give NaN, in-place writes raise.
"""

from __future__ import annotations

from enum import Enum, auto

import torch
from torch import Tensor, nn

from tiering.errors import EngineStateError
from zero3.flat_storage import CopiedStorage, ExchangedStorage, FlatStorage, Streams
from zero3.partition import FlatLayout
from zero3.tiers import Home, Tiers


class Residency(Enum):
    """Where a group's valid 16-bit bytes can be used from, and what that costs."""

    RESIDENT = auto()  # always on the device; costs the flat bytes there for good
    SHARDED = auto()  # on host or NVMe only; costs nothing on the device
    FETCHING = auto()  # on their way; the room on the device is taken
    UNSHARDED = auto()  # on the device until reshard; costs the flat bytes there


class ParamGroup:
    """A group with storage. ``params`` follow ``layout.pieces``; ``entries`` are the modules that unshard it.

    ``place`` is where in the working arena it is unsharded, None for wherever there is room.
    """

    def __init__(
        self,
        index: int,
        name: str,
        layout: FlatLayout,
        params: list[nn.Parameter],
        entries: list[nn.Module],
        parent: int | None,
        *,
        dtype: torch.dtype,
        home: Home,
        tiers: Tiers,
        streams: Streams | None,
        place: int | None,
    ) -> None:
        self.index = index
        self.name = name
        self.layout = layout
        self.params = params
        self.entries = entries
        self.parent = parent
        self.dtype = dtype
        self.home = home
        self._place = place
        self._stalls = tiers.stalls
        self._storage: FlatStorage | None = None
        if home.tensor is not None and home.tensor.device.type == tiers.device.type:
            flat = home.tensor.view(dtype)
            self.residency = Residency.RESIDENT
        else:
            self._storage = (
                CopiedStorage(layout.numel, dtype, home, tiers, streams)
                if tiers.plan.workload.fetch_by_copy
                else ExchangedStorage(layout.numel, dtype, home, tiers)
            )
            flat = self._storage.flat
            self.residency = Residency.SHARDED
        self.moves = self._storage is not None
        self.through_window = home.extent is not None and isinstance(self._storage, CopiedStorage)
        self.storage_key: int = flat.untyped_storage()._cdata  # the same whether or not the storage has bytes
        self._views = [flat[p.start : p.end].view(p.shape) for p in layout.pieces]
        nan = torch.full((), torch.nan, dtype=dtype, device=tiers.device)
        self._absent = [nan.expand(p.shape) for p in layout.pieces]
        if self._storage is not None:
            flat.untyped_storage().resize_(0)

    def adopt_parameters(self) -> None:
        """Point the parameters at this group, once its bytes are at home."""
        self._point(self._views if self.residency is Residency.RESIDENT else self._absent)

    def unshard(self, *, wait: bool = False) -> bool:
        """Start to bring the bytes to the device; False when there is no room now, unless ``wait`` is given."""
        if self.residency is not Residency.SHARDED:
            return True
        assert self._storage is not None
        if not self._storage.start(at=self._place, wait=wait):
            return False
        self.residency = Residency.FETCHING
        return True

    def wait_for_unshard(self) -> None:
        """Wait for the bytes and make the parameters usable."""
        if self.residency in (Residency.RESIDENT, Residency.UNSHARDED):
            return
        if self.residency is not Residency.FETCHING:
            raise EngineStateError(
                f"group {self.name!r} is {self.residency.name}: unshard it before waiting for it"
            )
        assert self._storage is not None
        with self._stalls.waiting_for("parameters"):
            self._storage.finish()
        self._point(self._views)
        self.residency = Residency.UNSHARDED

    def reshard(self) -> None:
        """Free the device's copy. Nothing is written: updates reach the home by the optimizer only."""
        if self.residency in (Residency.RESIDENT, Residency.SHARDED):
            return
        assert self._storage is not None
        if self.residency is Residency.UNSHARDED:
            self._point(self._absent)
        self.residency = Residency.SHARDED
        self._storage.drop()

    def _point(self, tensors: list[Tensor]) -> None:
        for param, tensor in zip(self.params, tensors, strict=True):
            param.data = tensor
