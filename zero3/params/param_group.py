"""ParamGroup: parameters that are unsharded and resharded together.

While a group is resharded its parameters hold no bytes and are of a class that knows it: see resharded.py. In-place
edits by the user's code are noticed by the version that torch counts for each parameter, and written back: an edit in
forward counts wherever the parameter lives.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tiering.errors import EngineStateError
from tiering.text import shorten
from zero3.device.closed_storage import Placeholder
from zero3.device.tiers import Home, Tiers
from zero3.params import resharded
from zero3.params.flat_storage import CopiedStorage, ExchangedStorage, FlatStorage
from zero3.params.gathered_storage import (
    ArenaGatheredStorage,
    DeviceGatheredStorage,
    ShardedStorage,
    ShardGathers,
)
from zero3.params.grouping import GroupMembers
from zero3.params.layout import FlatLayout
from zero3.ranks.collectives import Collectives


class Residency(Enum):
    """Where a group's valid 16-bit bytes can be used from, and what that costs."""

    RESIDENT = auto()  # always on the device; costs the flat bytes there for good
    SHARDED = auto()  # on host or NVMe only; costs nothing on the device
    FETCHING = auto()  # on their way; the room on the device is taken
    UNSHARDED = auto()  # on the device until reshard: for saved tensors, and for parameters that are shown


@dataclass(frozen=True)
class GroupMemory:
    """Where the bytes of one group are on this rank.

    ``home`` holds this rank's parameters: the whole group, or its shard if the group is sharded. ``shard`` is the
    layout of the part that this rank steps. The parameters of that part are at ``shard_home``: all of ``home``, or a
    range of it. ``offset`` is where in the working arena the group is unsharded; with None, any free range will do.
    """

    home: Home
    shard: FlatLayout
    shard_home: Home
    offset: int | None


class EditListener(Protocol):
    """Is called when parameters of a group have been edited in place, before their bytes leave the device."""

    def store_edits(self, group: ParamGroup, positions: list[int]) -> None:
        """Write the parameters at ``positions`` of ``group.params`` to their home and to their masters."""


class ParamGroup:
    """A group with storage: ``params`` in the order of ``layout.pieces``, in ``dtype``.

    ``entries`` are the modules whose call unshards it; ``parent`` is the index of the group around it. The group is
    ``sharded`` if ``collectives`` are given: they gather it. ``in_fp32``: its parameters are fp32 among others in 16
    bits, and so are its gradients.
    """

    def __init__(
        self,
        index: int,
        members: GroupMembers,
        layout: FlatLayout,
        memory: GroupMemory,
        dtype: torch.dtype,
        tiers: Tiers,
        collectives: Collectives | None,
    ) -> None:
        self.index = index
        self.name = members.name
        self.layout = layout
        by_index = {piece_index: param for piece_index, _, param in members.params}
        self.params = [by_index[piece.index] for piece in layout.pieces]
        self.entries = members.entries
        self.parent = members.parent
        self.in_fp32 = members.in_fp32
        self.dtype = dtype
        self.home = home = memory.home
        self.shard = memory.shard
        self.shard_home = memory.shard_home
        self.sharded = collectives is not None
        self._offset = memory.offset
        self._stalls = tiers.stalls
        self._timeline = tiers.timeline
        self._storage: FlatStorage | None = None
        by_copy = tiers.plan.workload.fetch_by_copy
        if collectives is None and home.tensor is not None and home.on_host == tiers.device_is_host:
            flat = home.tensor.view(dtype)
            self.residency = Residency.RESIDENT
        else:
            gathers = None if collectives is None else ShardGathers(layout, dtype, collectives, self.name)
            self._storage = _make_storage(layout, dtype, home, tiers, gathers)
            flat = self._storage.flat
            self.residency = Residency.SHARDED
        self.moves = self._storage is not None
        self.through_window = home.extent is not None and by_copy
        # For its next use, if no other group is fetched before that: it costs the network, or a GPU's link.
        self.stays = self.sharded or (self.moves and by_copy and not self.through_window)
        self._waits_apart = self.sharded or by_copy  # the storage says itself where it waits
        self.storage_key: int = flat.untyped_storage()._cdata  # the same whether or not the storage has bytes
        self._views = [flat[p.start : p.end].view(p.shape) for p in layout.pieces]
        description = f"a parameter of group {self.name!r}"
        self._absent = Placeholder((p.shape for p in layout.pieces), dtype, tiers.device, description)
        self._plain = [resharded.plain_form(type(param)) for param in self.params]
        self._versions: list[int] = []  # of the parameters, as far as the engine knows
        # Positions whose .data was handed out: it can be changed without a new version.
        self._aliased: set[int] = set()
        self._shown = False  # whether the parameters are plain ones now
        # Position in params that shows a copy (gathered) -> its version and address then.
        self._lent: dict[int, tuple[int, int]] = {}
        self._only_read: set[int] = set()  # of them, those that nobody may change
        self._before: dict[int, Tensor] = {}  # what these held when their .data was handed out
        self._edit_listener: EditListener | None = None
        if self._storage is not None:
            self._storage.take_bytes(description)

    def listen(self, listener: EditListener) -> None:
        """Call ``listener`` from now on for in-place edits, which may happen once the parameters are adopted."""
        self._edit_listener = listener

    def adopt_parameters(self) -> None:
        """Point the parameters at this group, once its bytes are at home."""
        self._point_nowhere()
        self.note_versions()
        if self.residency is Residency.RESIDENT:
            self.show()

    def show(self) -> None:
        """Make the parameters show the group's bytes, which are there."""
        if self.residency not in (Residency.RESIDENT, Residency.UNSHARDED):
            raise EngineStateError(
                f"group {self.name!r} is {self.residency.name}: unshard it before its parameters are shown"
            )
        if not self._shown:
            self._check_unchanged()
            self._shown = True
            self._absent.open()  # until the parameters hold it again
            for position, view in enumerate(self._views):
                if position not in self._lent:
                    self._point(position, view)
            self.note_versions()

    def hide(self, *, keep_edits: bool = True) -> None:
        """Undo ``show``. Updates reach the home by the optimizer; only an in-place edit is written here."""
        if not self._shown or self.residency is Residency.RESIDENT:
            return
        try:
            if keep_edits and (edited := self.edited()):
                assert self._edit_listener is not None
                self._edit_listener.store_edits(self, edited)
        finally:
            self._point_nowhere()
            self.note_versions()

    def give_up_parameters(self) -> None:
        """The engine is closed: whatever uses the parameters from now on is told so."""
        self._lent.clear()
        self._only_read.clear()
        self._before.clear()
        self._point_nowhere()
        self._views.clear()
        resharded.disown(self.params)

    def lend(self, position: int, copy: Tensor, *, modify: bool) -> None:
        """Let the parameter at ``position`` show ``copy``, whatever the group does, until ``take_back``."""
        self._absent.open()
        self._point(position, copy)
        if not self._shown:
            self._absent.close()
        if not modify:
            self._only_read.add(position)
        self._lent[position] = self.params[position]._version, copy.data_ptr()

    def lends_at(self, position: int) -> bool:
        """Whether the parameter at ``position`` is lent."""
        return position in self._lent

    def lent_was_edited(self, position: int) -> bool:
        """Whether the parameter at ``position`` was written in place since it was lent."""
        param = self.params[position]
        before = self._before.get(position)
        return (param._version, param.data_ptr()) != self._lent[position] or (
            before is not None and not torch.equal(before, _bytes_of(param))
        )

    def take_back(self, position: int) -> None:
        """Undo ``lend``."""
        del self._lent[position]
        self._only_read.discard(position)
        self._before.pop(position, None)
        if self._shown:
            self._point(position, self._views[position])
        else:
            self._absent.open()
            self._hide(position)
            self._absent.close()
        self._versions[position] = self.params[position]._version

    @property
    def shown(self) -> bool:
        """Whether the parameters show their bytes."""
        return self._shown

    @property
    def lends(self) -> bool:
        """Whether any parameter shows a copy."""
        return bool(self._lent)

    def view(self, position: int) -> Tensor:
        """The parameter's values in the flat storage; without bytes while the group is resharded."""
        return self._views[position]

    def check_memory(self) -> None:
        """EngineStateError for a parameter that should show the group's bytes and does not."""
        for position, (param, view) in enumerate(zip(self.params, self._views, strict=True)):
            if param.data_ptr() != view.data_ptr() and position not in self._lent:
                raise EngineStateError(
                    f"{self.layout.pieces[position].name!r} was given other memory after initialize (by .data = or"
                    " module.to()), which the engine does not train; change values in place inside"
                    " tiering.gathered(param, modify=True), and dtype or device before initialize"
                )

    def edited(self) -> list[int]:
        """Positions of the parameters that were, or may have been, written in place since they show their bytes.

        EngineStateError for one that no longer shows these bytes.
        """
        self.check_memory()
        return [
            position
            for position, (param, version) in enumerate(zip(self.params, self._versions, strict=True))
            if (param._version != version or position in self._aliased) and position not in self._lent
        ]

    def alias(self, position: int) -> None:
        """The .data of the parameter at ``position`` was handed out: it counts as edited while it is shown."""
        if position not in self._lent:  # what a loan hands out is a copy, whose changes take_back sees
            self._aliased.add(position)
        if position in self._only_read and position not in self._before:
            self._before[position] = _bytes_of(self.params[position]).clone()

    def note_versions(self) -> None:
        """What the parameters hold now is what the engine knows."""
        self._versions = [param._version for param in self.params]

    def _check_unchanged(self) -> None:
        """Nobody has written through what an earlier forward left behind: it would be lost."""
        before, now = self._versions, [param._version for param in self.params]
        self._versions = now
        for position, (old, new) in enumerate(zip(before, now, strict=False)):
            if old != new and position not in self._lent:
                raise EngineStateError(
                    f"{self.layout.pieces[position].name!r} was changed in place through a view that was kept from an"
                    " earlier forward, while its bytes were elsewhere: the change is lost. Make changes inside"
                    " tiering.gathered(param, modify=True)"
                )

    def unshard(self, *, wait: bool = False) -> bool:
        """Start to bring the bytes to the device; False when there is no room now, unless ``wait`` is given."""
        if self.residency is not Residency.SHARDED:
            return True
        assert self._storage is not None
        if not self._storage.start(at=self._offset, wait=wait):
            return False
        self.residency = Residency.FETCHING
        if self._timeline.recording:
            self._timeline.begin("fetch", self.name, **self._described())
        return True

    def advance(self) -> None:
        """Go on with an unsharding that was begun, as far as that waits for nothing."""
        if self.residency is Residency.FETCHING:
            assert self._storage is not None
            self._storage.advance()

    @property
    def reads_first(self) -> bool:
        """Whether ``gather`` may have to wait for a read."""
        return self.sharded and self.home.extent is not None

    @property
    def gathered(self) -> bool:
        """Whether ``gather`` was called since ``unshard``."""
        return isinstance(self._storage, ShardedStorage) and self._storage.gathers.begun

    def gather(self, *, foreseen: bool) -> None:
        """Begin to gather the shards of an unsharding that was started; ``foreseen`` by all ranks as their next."""
        assert isinstance(self._storage, ShardedStorage) and self.residency is Residency.FETCHING
        self._storage.gather(foreseen=foreseen)

    def spare(self) -> None:
        """Count a use that needs no gather: the bytes are there since the last one."""
        assert isinstance(self._storage, ShardedStorage)
        self._storage.gathers.spare()

    def wait_for_unshard(self) -> None:
        """Wait for the bytes."""
        if self.residency in (Residency.RESIDENT, Residency.UNSHARDED):
            return
        if self.residency is not Residency.FETCHING:
            raise EngineStateError(
                f"group {self.name!r} is {self.residency.name}: unshard it before waiting for it"
            )
        assert self._storage is not None
        with nullcontext() if self._waits_apart else self._stalls.waiting_for("parameters"):
            self._storage.finish()
        self.residency = Residency.UNSHARDED
        if self._timeline.recording:
            self._timeline.end("fetch", self.name)

    def reshard(self, *, keep_edits: bool = True) -> None:
        """Free the device's copy."""
        if self.residency in (Residency.RESIDENT, Residency.SHARDED):
            return
        assert self._storage is not None
        if self._timeline.recording and self.residency is Residency.FETCHING:
            self._timeline.end("fetch", self.name, dropped=True)
        try:
            self.hide(keep_edits=keep_edits)
        finally:
            self.residency = Residency.SHARDED
            self._storage.drop()

    def _described(self) -> dict[str, Any]:
        names = shorten(tuple(piece.name for piece in self.layout.pieces))
        return {"bytes": self.layout.numel * self.dtype.itemsize, "tensors": names}

    def _point_nowhere(self) -> None:
        self._shown = False
        self._aliased.clear()
        self._absent.open()
        for position in range(len(self.params)):
            if position not in self._lent:
                self._hide(position)
        self._absent.close()

    def _point(self, position: int, values: Tensor) -> None:
        param = self.params[position]
        param.__class__ = resharded.shown_form(self._plain[position])
        resharded.set_data(param, values)

    def _hide(self, position: int) -> None:
        self._point(position, self._absent.views[position])
        self.params[position].__class__ = resharded.resharded_form(self._plain[position])


def _make_storage(
    layout: FlatLayout, dtype: torch.dtype, home: Home, tiers: Tiers, gathers: ShardGathers | None
) -> FlatStorage:
    """The storage of a group that moves."""
    by_copy = tiers.plan.workload.fetch_by_copy
    if gathers is not None:
        gathered = DeviceGatheredStorage if by_copy else ArenaGatheredStorage
        return gathered(layout, dtype, home, tiers, gathers)
    whole = CopiedStorage if by_copy else ExchangedStorage
    return whole(layout.numel, dtype, home, tiers)


def _bytes_of(param: nn.Parameter) -> Tensor:
    return resharded.data_of(param).reshape(-1).view(torch.uint8)
