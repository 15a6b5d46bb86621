"""Updates on a GPU of tiles that live in host memory, entirely or in part: they visit the device.

Note [Visits to the device]
    The parts of a tile in host memory are copied to a slot of device memory, stepped there on a separate stream, and
    copied back. The CPU queues these operations and waits for none of them: an event orders the copies into a slot
    behind the copies that still leave it, and copies in both directions and kernels of several tiles run at the same
    time. Meanwhile the CPU steps other tiles.

    Until ``settle`` the CPU must neither read nor write the host memory of tiles that were queued. Copies to the device
    that are queued after ``publish``, and kernels of compute that are queued after ``hold_compute``, see the new
    parameters; gradients of such kernels come behind the copies of the gradients that they replace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from optim_cpu.kernels import Rule
from tiering.placement.tenants import OPTIMIZER_STATE
from tiering.placement.workload import Tier
from tiering.telemetry import COPIES_OF
from zero3.device.home import Home
from zero3.device.kernels import Segment
from zero3.device.streams import Event
from zero3.device.tiers import Tiers
from zero3.optimizer.tiles import FP32, StateLayout, Tile
from zero3.passes.gradients import GradientStore

# Rounds through all slots that are queued ahead: a batch of the CPU's kernels takes as long as several tiles. In
# backward fewer, because copies of parameters and gradients have to wait for them.
ROUNDS = 4
IN_BACKWARD = 1


@dataclass
class _Slot:
    """A part of the window: its offset, and the event after which it may be written."""

    offset: int
    free: Event


@dataclass(frozen=True)
class OnDevice:
    """A tile in device memory: the bytes of its state, its parameters and its gradients."""

    tile: Tile
    state: Tensor
    param: Tensor
    grad: Tensor

    def segments(
        self, layout: StateLayout, rules: Mapping[int, Rule], grad_dtype: torch.dtype
    ) -> dict[int, Segment]:
        """The segments whose parameters, by their index, have a rule, for the kernels. By that index."""
        tile = self.tile
        master = self.state[: tile.numel * layout.master_itemsize]
        moments = self.state[master.numel() :].view(layout.moment_dtype()).view(layout.moments, tile.numel)
        param, grad = self.param.view(tile.group.dtype), self.grad.view(grad_dtype)
        result = {}
        for segment, first_index in zip(tile.segments, tile.first_indices, strict=True):
            rule = rules.get(segment.piece.index)
            if rule is None:
                continue
            elements = slice(segment.start - tile.start, segment.start - tile.start + segment.numel)
            separate = layout.master_itemsize == FP32
            result[segment.piece.index] = Segment(
                rule,
                master.view(torch.float32)[elements] if separate else param[elements],
                moments[:, elements].unbind(),
                grad[elements],
                out=param[elements] if separate else None,
                remainder=master.view(torch.int16)[elements] if layout.splits else None,
                state_format=layout.moment_format,
                first_index=first_index,
            )
        return result


def part_of(home: Home, tile: Tile, itemsize: int) -> Tensor:
    """The bytes of ``tile`` in ``home``, which is in memory with ``itemsize`` bytes per element of the shard."""
    assert home.tensor is not None
    return home.tensor[tile.start * itemsize : tile.end * itemsize]


class DeviceUpdate:
    """Updates tiles through the update window of the device (see Note [Visits to the device])."""

    def __init__(self, gradients: GradientStore, tiers: Tiers) -> None:
        assert tiers.streams is not None and tiers.copies is not None
        self._gradients = gradients
        self._stalls = tiers.stalls
        self._streams = tiers.streams
        self._copies = tiers.copies
        self._window = window = tiers.plan.update_window
        self._needs_params = tiers.plan.workload.steps_need_params
        # ``tiers`` owns this memory and frees it.
        self._memory = tiers.home(Tier.DEVICE, window.nbytes, "update window", ())
        allocated = self._streams.compute.record()  # torch may fill what it allocates
        self._slots = deque(_Slot(at, allocated) for at in range(0, window.nbytes, window.slot_bytes))
        self._under_way = deque[Event]()  # the last events of tiles that were queued
        self._stepped: Event | None = None  # the update of the last tile, until ``settle``
        self._returned: Event | None = None  # the last copy back

    def ready(self, *, rounds: int) -> bool:
        """Whether fewer tiles are queued than fill all slots ``rounds`` times. Never waits."""
        # From the oldest on. The count may be too high for a moment: then less is queued ahead.
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft()
        return len(self._under_way) < rounds * len(self._slots)

    def run(self, tile: Tile, stepped: list[range], step: Callable[[OnDevice], None]) -> None:
        """Queue the update of ``tile``: ``step`` queues its kernels.

        Its gradients are final. ``stepped`` are the ranges of its elements whose parameters change.
        """
        slot, window, update = self._slots[0], self._window, self._streams.update
        params, grads = tile.group.shard_home, self._gradients.homes[tile.group.index]
        itemsize = tile.group.dtype.itemsize
        needs_params = self._needs_params or tile.group.in_fp32
        state = self._fetch(slot, 0, tile.state, tile.state.tensor)
        param = self._fetch(
            slot, window.param_offset, params, part_of(params, tile, itemsize), needed=needs_params
        )
        grad_itemsize = self._gradients.dtype_of(tile.group).itemsize
        grad = self._fetch(slot, window.grad_offset, grads, part_of(grads, tile, grad_itemsize))
        # The update runs after the copies that leave the slot; after all copies to the device, because others may still
        # read the parameters at home; and after compute, which made the gradients and may still read the parameters.
        update.wait_for(slot.free)
        update.wait_for(self._streams.fetch.record())
        update.wait_for(self._streams.compute.record())
        with update.running():
            step(OnDevice(tile, state, param, grad))
        # Behind the kernels of the update, and so behind the copies for which these waited.
        end = self._stepped = update.record()
        if tile.state.on_host and state.numel():
            end = self._copy_back(tile.state.tensor, state, end)
        if params.on_host:
            target = part_of(params, tile, itemsize)
            for part in [range(tile.numel)] if needs_params else stepped:
                elements = slice(part.start * itemsize, part.stop * itemsize)
                end = self._copy_back(target[elements], param[elements], end)
        # Copies back run on one stream, so ``end`` is behind all of this tile's. The next tile in this slot waits for
        # it: its copies would overwrite bytes that are still copied back.
        slot.free = end
        self._slots.rotate(-1)
        self._under_way.append(end)

    def hold_compute(self) -> None:
        """Order later kernels of compute behind the updates in device memory."""
        if self._stepped is not None:
            # The updates run on one stream: when the last of them has ended, all have.
            self._copies.hold_compute(self._stepped, OPTIMIZER_STATE)

    def publish(self) -> None:
        """Order later copies to the device behind the copies back to host memory. The CPU does not wait."""
        if self._returned is not None:
            self._streams.fetch.wait_for(self._returned)

    def settle(self) -> None:
        """Wait until the device neither reads nor writes host memory."""
        # Behind ``_stepped``, no copy to the device reads host memory; behind ``_returned``, no copy back writes to it.
        for last in (self._stepped, self._returned):
            if last is not None:
                with self._stalls.waiting_for(COPIES_OF + OPTIMIZER_STATE):
                    last.wait()
        self._stepped = self._returned = None
        self._under_way.clear()

    def _fetch(
        self, slot: _Slot, offset: int, home: Home, source: Tensor | None, *, needed: bool = True
    ) -> Tensor:
        """Bytes of ``home`` in device memory: ``here``, or their place in ``slot``, copied there if ``needed``."""
        assert source is not None and self._memory.tensor is not None
        if home.on_device:
            return source
        start = slot.offset + offset
        target = self._memory.tensor[start : start + source.numel()]
        if needed and source.numel():
            # After ``free``: copies of the tile that was here before may still leave the slot.
            self._copies.to_device(target, source, after=[slot.free], kind=OPTIMIZER_STATE)
        return target

    def _copy_back(self, home: Tensor | None, changed: Tensor, stepped: Event) -> Event:
        """Queue the copy of changed bytes to their home; its event."""
        assert home is not None
        # The event of the last copy stands for all: they run on one stream.
        self._returned = self._copies.to_host(home, changed, after=[stepped], kind=OPTIMIZER_STATE)
        return self._returned
