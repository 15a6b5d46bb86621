"""ParamGroup: parameters that are unsharded and resharded together.

While a group is resharded its parameters hold no bytes, and their class is changed: see resharded.py. In-place edits
by the user's code are detected by the version that torch counts for each parameter, and written to the home: an edit in
forward has the same effect wherever the parameter lives.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tiering._text import shorten
from tiering.errors import EngineStateError
from tiering.placement.tenants import PARAMETERS
from zero3.device.home import Home
from zero3.device.storages import Placeholder
from zero3.device.tiers import Tiers
from zero3.params import inner_tensors, resharded
from zero3.params.flat_storage import CopiedStorage, ExchangedStorage, FlatStorage, HiddenStorage
from zero3.params.fused_experts import join_up
from zero3.params.gathered_storage import (
    ArenaGatheredStorage,
    DeviceGatheredStorage,
    ShardedStorage,
    ShardGathers,
)
from zero3.params.grouping import GroupMembers
from zero3.params.layout import FlatLayout, Piece
from zero3.ranks.collectives import Collectives


class Residency(Enum):
    """The place of a group's valid bytes, and their cost on the device."""

    # Always on the device: costs the flat bytes there for the engine's lifetime.
    RESIDENT = auto()
    # On host or NVMe only: costs nothing on the device.
    SHARDED = auto()
    # On their way to the device: the room for them is leased.
    FETCHING = auto()
    # On the device until ``reshard``, for saved tensors and for parameters that show their values.
    UNSHARDED = auto()


@dataclass(frozen=True)
class GroupMemory:
    """Where the bytes of one group are on this rank.

    ``home`` holds this rank's parameters: the whole group, or its shard if the group is sharded. ``shard`` is the
    layout of the part that this rank steps. The parameters of that part are at ``shard_home``: all of ``home``, or a
    range of it. ``offset`` is where in the working arena the group is unsharded; with None, any free range will do.
    ``hidden``: the home is where compute uses the bytes, and they are out of reach between uses.
    """

    home: Home
    shard: FlatLayout
    shard_home: Home
    offset: int | None
    hidden: bool = False


class EditListener(Protocol):
    """Is called when parameters of a group have been edited in place, before their bytes leave the device."""

    def store_edits(self, group: ParamGroup, positions: list[int]) -> None:
        """Write the parameters at ``positions`` of ``group.params`` to their home and to their masters."""


class ParamGroup:
    """A group with storage: ``params`` in the order of ``layout.pieces``, in a flat tensor of ``dtype``.

    ``entries`` are the modules whose call unshards it; ``parent`` is the index of the group around it, ``beside`` that
    of the other group of the same modules. The group is ``sharded`` if ``collectives`` are given: they gather it.
    ``in_fp32``: its parameters are fp32 among others in 16 bits, and so are its gradients. ``hidden``: see GroupMemory.
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
        self.beside = members.beside
        self.routing = members.routing
        # With fused experts: the groups of all their slices, expert by expert.
        self.slices: list[ParamGroup] = []
        # Of a slice: those of the same expert, which an operation may use at the same time.
        self.same_expert: Sequence[ParamGroup] = ()
        self.in_fp32 = members.in_fp32
        self.dtype = dtype
        self.home = memory.home
        self.shard = memory.shard
        self.shard_home = memory.shard_home
        self.sharded = collectives is not None
        self.hidden = memory.hidden
        self._offset = memory.offset
        self._stalls = tiers.stalls
        self._timeline = tiers.timeline
        self._freed = tiers.freed
        self._storage = _make_storage(layout, dtype, memory, tiers, collectives, self.name)
        flat = _resident(memory, dtype) if self._storage is None else self._storage.flat
        self.residency = Residency.RESIDENT if self._storage is None else Residency.SHARDED
        self.moves = self._storage is not None
        by_copy = tiers.plan.workload.fetch_by_copy
        self.through_window = self.home.on_nvme and by_copy
        # The group stays on the device for its next use, if no other group is fetched before that: fetching it again
        # costs the network, or a GPU's link.
        self.stays = self.sharded or (self.moves and by_copy and not self.through_window)
        # These storages report their stalls themselves.
        self._storage_reports_stalls = self.sharded or by_copy
        # The identity of the storage, which does not depend on whether it has bytes.
        self.storage_key: int = flat.untyped_storage()._cdata
        self._views = [piece.view_of(flat) for piece in layout.pieces]
        description = f"a parameter of group {self.name!r}"
        forms = ((piece.shape, self.dtype_of(piece)) for piece in layout.pieces)
        self._absent = Placeholder(forms, dtype, tiers.device, description)
        self._plain = [resharded.plain_form(type(param)) for param in self.params]
        # The versions of the parameters after the last change that the engine knows of.
        self._versions: list[int] = []
        # Positions whose .data was read: it can be changed without a new version. And of edits that are not stored yet.
        self._aliased: set[int] = set()
        # Whether the parameters show the group's bytes.
        self._is_shown = False
        # Positions in ``params`` that show a copy (``gathered``): version and address when the copy was set.
        self._copies: dict[int, tuple[int, int]] = {}
        # Of these, positions whose copy must not be changed.
        self._read_only: set[int] = set()
        # Of these, the bytes of copies at the moment when their .data was read.
        self._bytes_before: dict[int, Tensor] = {}
        self._edit_listener: EditListener | None = None
        if self._storage is not None:
            # Last: the views above are made while the storage has bytes.
            self._storage.remove_bytes(description)

    def dtype_of(self, piece: Piece) -> torch.dtype:
        """The dtype of the parameter of ``piece``: the group's, unless it keeps its own."""
        return piece.own_dtype or self.dtype

    def listen(self, listener: EditListener) -> None:
        """Call ``listener`` from now on for in-place edits, which may happen once the parameters are adopted."""
        self._edit_listener = listener

    def adopt_parameters(self) -> None:
        """Make the model's parameters those of this group; its bytes are at home."""
        self._point_nowhere()
        self.note_versions()
        if self.residency is Residency.RESIDENT:
            self.show()

    def show(self) -> None:
        """Make the parameters show the group's bytes. EngineStateError if these are not on the device."""
        if self.residency not in (Residency.RESIDENT, Residency.UNSHARDED):
            raise EngineStateError(
                f"group {self.name!r} is {self.residency.name}: unshard it before its parameters are shown"
            )
        if not self._is_shown:
            # Before the versions are noted: otherwise a write to dropped bytes would look like the engine's own.
            self._check_unchanged()
            self._is_shown = True
            # The placeholder is open while parameters are pointed elsewhere; ``_point_nowhere`` closes it.
            self._absent.open()
            for position, view in enumerate(self._views):
                if position not in self._copies:
                    self._point(position, view)
            self.note_versions()

    def hide(self, *, keep_edits: bool = True) -> None:
        """Undo ``show``. With ``keep_edits``, in-place edits are stored; the optimizer writes its updates itself.

        Otherwise they are dropped. A home that is used in place has them already, and the next ``hide`` stores them.
        """
        if not self._is_shown or self.residency is Residency.RESIDENT:
            return
        unstored = list[int]()
        try:
            if keep_edits or self.hidden:
                # The bytes are still attached, and edits are read from them.
                unstored = self.edited()
            if keep_edits and unstored:
                assert self._edit_listener is not None
                self._edit_listener.store_edits(self, unstored)
                unstored = []
        finally:
            self._point_nowhere()
            if self.hidden:
                # They count as edits once more.
                self._aliased.update(unstored)
            self.note_versions()

    def give_up_parameters(self) -> None:
        """Close the parameters with the engine: each use raises ResidencyError from now on."""
        join_up(self.params)
        for each in self.slices:
            each.give_up_parameters()
        # First: parameters that show copies are closed with the others.
        self._copies.clear()
        self._read_only.clear()
        self._bytes_before.clear()
        self._point_nowhere()
        self._views.clear()
        resharded.disown(self.params)

    def show_copy(self, position: int, copy: Tensor, *, modify: bool) -> None:
        """Let the parameter at ``position`` show ``copy`` until ``hide_copy``, whatever the group does."""
        self._absent.open()
        self._point(position, copy)
        if not self._is_shown:
            self._absent.close()
        if not modify:
            self._read_only.add(position)
        # Last: from now on, a different version or address means an edit.
        self._copies[position] = self.params[position]._version, copy.data_ptr()

    def shows_copy_at(self, position: int) -> bool:
        """Whether the parameter at ``position`` shows a copy."""
        return position in self._copies

    def copy_was_edited(self, position: int) -> bool:
        """Whether the copy that the parameter at ``position`` shows was written in place."""
        param = self.params[position]
        before = self._bytes_before.get(position)
        return (param._version, param.data_ptr()) != self._copies[position] or (
            before is not None and not torch.equal(before, _bytes_of(param))
        )

    def hide_copy(self, position: int) -> None:
        """Undo ``show_copy``."""
        del self._copies[position]
        self._read_only.discard(position)
        self._bytes_before.pop(position, None)
        if self._is_shown:
            self._point(position, self._views[position])
        else:
            self._absent.open()
            self._hide(position)
            self._absent.close()
        # Last: the changes above are the engine's own, and no edits.
        self._versions[position] = self.params[position]._version

    @property
    def is_shown(self) -> bool:
        """Whether the parameters show their bytes."""
        return self._is_shown

    @property
    def is_used_at_home(self) -> bool:
        """Whether compute reads the bytes at home, which nobody changes meanwhile."""
        return self.hidden and self.residency is not Residency.SHARDED

    @property
    def shows_copies(self) -> bool:
        """Whether any parameter shows a copy."""
        return bool(self._copies)

    def view(self, position: int) -> Tensor:
        """The parameter's view into the flat storage; it has no bytes while the group is resharded."""
        return self._views[position]

    def check_memory(self) -> None:
        """Raise EngineStateError if a parameter does not show the group's bytes."""
        for position, (param, view) in enumerate(zip(self.params, self._views, strict=True)):
            if param.data_ptr() != view.data_ptr() and position not in self._copies:
                raise EngineStateError(
                    f"{self.layout.pieces[position].name!r} was assigned other memory after initialize (by .data = or"
                    " module.to()), which the engine does not train; change values in place inside"
                    " tiering.gathered(param, modify=True), and dtype or device before initialize"
                )

    def edited(self) -> list[int]:
        """Positions of the parameters that were, or may have been, written in place since ``show``.

        Raises EngineStateError for a parameter that does not show the group's bytes.
        """
        self.check_memory()
        return [
            position
            for position, (param, version) in enumerate(zip(self.params, self._versions, strict=True))
            if (param._version != version or position in self._aliased) and position not in self._copies
        ]

    def alias(self, position: int) -> None:
        """Count the parameter at ``position``, whose .data was read, as edited while it shows its bytes."""
        # The .data of a copy is a part of the copy, which ``copy_was_edited`` compares.
        if position not in self._copies:
            self._aliased.add(position)
        if position in self._read_only and position not in self._bytes_before:
            self._bytes_before[position] = _bytes_of(self.params[position]).clone()

    def note_versions(self) -> None:
        """Note that the engine knows of all changes up to now."""
        self._versions = [param._version for param in self.params]

    def _check_unchanged(self) -> None:
        """Raise EngineStateError for a write through a view of an earlier forward, which has lost its memory."""
        before, now = self._versions, [param._version for param in self.params]
        self._versions = now
        for position, (old, new) in enumerate(zip(before, now, strict=False)):
            if old != new and position not in self._copies:
                raise EngineStateError(
                    f"{self.layout.pieces[position].name!r} was changed in place through a view that was kept from an"
                    " earlier forward, while its values were on another tier: the change is lost. Make changes inside"
                    " tiering.gathered(param, modify=True)"
                )

    def unshard(self, *, wait: bool = False) -> bool:
        """Start to bring the bytes to the device; False if there is no room now, unless ``wait`` is set."""
        if self.residency is not Residency.SHARDED:
            return True
        assert self._storage is not None
        if not self._storage.start(at=self._offset, wait=wait):
            return False
        # Only once the fetch has begun: after an exception the group is still sharded.
        self.residency = Residency.FETCHING
        if self._timeline.recording:
            self._timeline.begin("fetch", self.name, **self._described())
        return True

    def advance(self) -> None:
        """Continue an ``unshard`` as far as possible without a wait."""
        if self.residency is Residency.FETCHING:
            assert self._storage is not None
            self._storage.advance()

    @property
    def reads_first(self) -> bool:
        """Whether ``gather`` may have to wait for a read."""
        return self.sharded and self.home.on_nvme

    @property
    def gathered(self) -> bool:
        """Whether ``gather`` was called since ``unshard``."""
        return isinstance(self._storage, ShardedStorage) and self._storage.gathers.has_begun

    def gather(self, *, foreseen: bool) -> None:
        """Begin to gather the shards, after ``unshard``; all ranks have ``foreseen`` that this gather is next."""
        assert isinstance(self._storage, ShardedStorage) and self.residency is Residency.FETCHING
        self._storage.gather(foreseen=foreseen)

    def spare(self) -> None:
        """Count a use that needs no gather, because the bytes of the last gather are still there."""
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
        with nullcontext() if self._storage_reports_stalls else self._stalls.waiting_for(PARAMETERS):
            self._storage.finish()
        # Only once the bytes are attached: before that, the storage refuses reads.
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
            # Before the bytes go: edits are read from them, and no parameter may point to memory that others reuse.
            self.hide(keep_edits=keep_edits)
        finally:
            # Also if an edit could not be stored: other groups need the room.
            self.residency = Residency.SHARDED
            self._storage.drop()
            if self._freed is not None:
                # Of the operations that used the group, temporaries and gradients were freed.
                self._freed.look()

    def _described(self) -> dict[str, Any]:
        names = shorten(tuple(piece.name for piece in self.layout.pieces))
        return {"bytes": self.layout.numel * self.dtype.itemsize, "tensors": names}

    def _point_nowhere(self) -> None:
        self._is_shown = False
        self._aliased.clear()
        self._absent.open()
        for position in range(len(self.params)):
            if position not in self._copies:
                self._hide(position)
        self._absent.close()

    def _point(self, position: int, values: Tensor) -> None:
        param = self.params[position]
        # First the class: a resharded parameter refuses other data.
        param.__class__ = resharded.shown_form(self._plain[position])
        resharded.set_data(param, values)
        inner_tensors.follow(param)

    def _hide(self, position: int) -> None:
        self._point(position, self._absent.views[position])
        # Last, for the same reason.
        param = self.params[position]
        param.__class__ = resharded.resharded_form(self._plain[position])
        inner_tensors.follow(param)


def _make_storage(
    layout: FlatLayout,
    dtype: torch.dtype,
    memory: GroupMemory,
    tiers: Tiers,
    collectives: Collectives | None,
    name: str,
) -> FlatStorage | None:
    """The storage of a group whose bytes come and go; None if they are always on the device."""
    home, by_copy = memory.home, tiers.plan.workload.fetch_by_copy
    if collectives is not None:
        gathered = DeviceGatheredStorage if by_copy else ArenaGatheredStorage
        return gathered(layout, dtype, home, tiers, ShardGathers(layout, dtype, collectives, name))
    if memory.hidden:
        return HiddenStorage(layout.numel, dtype, home, tiers)
    if home.tensor is not None and home.on_host == tiers.device_is_host:
        return None
    return (CopiedStorage if by_copy else ExchangedStorage)(layout.numel, dtype, home, tiers)


def _resident(memory: GroupMemory, dtype: torch.dtype) -> Tensor:
    assert memory.home.tensor is not None
    return memory.home.tensor.view(dtype)


def _bytes_of(param: nn.Parameter) -> Tensor:
    return resharded.data_of(param).reshape(-1).view(torch.uint8)
