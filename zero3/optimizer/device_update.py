"""Updates on a GPU of tiles that live in host memory, or a part of which does: they visit it.

Note [Visits to the device]
    A tile's state, and what else of it is in host memory, is copied to a slot of device memory, stepped there on a
    stream of its own, and copied back to where it was. The CPU queues all that and waits for none of it: a slot is
    filled anew behind the copies that still leave it, by an event, and copies both ways and kernels of several tiles
    run at once. Meanwhile the CPU steps other tiles.

    Until ``settle`` the CPU must neither read nor write the host memory of tiles that were queued. Copies to the device
    that are queued after ``publish``, and what compute is told after ``show``, see the new parameters; gradients that
    compute makes then come behind the copies of those that they take the place of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from optim_cpu.kernels import Rule
from tiering.placement.workload import Tier
from tiering.telemetry import COPIES_OF
from zero3.device.kernels import Segment
from zero3.device.streams import Event
from zero3.device.tiers import Home, Tiers
from zero3.optimizer.tiles import FP32, StateLayout, Tile
from zero3.passes.gradients import GradientStore

KIND = "optimizer state"
ROUNDS = (
    4  # through all slots that are queued in a step: a batch of the CPU's kernels takes as long as some tiles
)
IN_BACKWARD = 1  # that are queued there: copies of parameters and gradients have to wait for them


@dataclass
class _Slot:
    """Where a part of the window begins, and what has to be over before it is written to."""

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
    ) -> list[Segment]:
        """What the kernels step: the segments whose parameters, by their index, have a rule."""
        tile = self.tile
        kept = self.state[: tile.numel * layout.master_itemsize]
        moments = self.state[kept.numel() :].view(layout.moment_dtype()).view(layout.moments, tile.numel)
        param, grad = self.param.view(tile.group.dtype), self.grad.view(grad_dtype)
        made = []
        for segment, first_index in zip(tile.segments, tile.first_indices, strict=True):
            rule = rules.get(segment.piece.index)
            if rule is None:
                continue
            here = slice(segment.start - tile.start, segment.start - tile.start + segment.numel)
            separate = layout.master_itemsize == FP32
            made.append(
                Segment(
                    rule,
                    kept.view(torch.float32)[here] if separate else param[here],
                    moments[:, here].unbind(),
                    grad[here],
                    out=param[here] if separate else None,
                    remainder=kept.view(torch.int16)[here] if layout.splits else None,
                    state_format=layout.moment_format,
                    first_index=first_index,
                )
            )
        return made


def part_of(home: Home, tile: Tile, itemsize: int) -> Tensor:
    """The bytes of ``tile`` in ``home``, which is in memory and has ``itemsize`` of them per element of a shard."""
    assert home.tensor is not None
    return home.tensor[tile.start * itemsize : tile.end * itemsize]


class DeviceUpdate:
    """Takes tiles that visit the device through its update window (see Note [Visits to the device])."""

    def __init__(self, gradients: GradientStore, tiers: Tiers) -> None:
        assert tiers.streams is not None and tiers.copies is not None
        self._gradients = gradients
        self._stalls = tiers.stalls
        self._streams = tiers.streams
        self._copies = tiers.copies
        self._window = window = tiers.plan.update_window
        self._needs_params = tiers.plan.workload.steps_need_params
        self._memory = tiers.home(Tier.DEVICE, window.nbytes, "update window", ())  # theirs, to let go of
        made = self._streams.compute.record()  # torch may fill what it allocates
        self._slots = deque(_Slot(at, made) for at in range(0, window.nbytes, window.slot_bytes))
        self._under_way = deque[Event]()  # the ends of tiles that were queued
        self._stepped: Event | None = None  # the last tile that was, if nobody has waited for it
        self._returned: Event | None = None  # the last copy back

    def ready(self, *, rounds: int) -> bool:
        """Whether fewer tiles are under way than go through all slots in so many rounds. Never waits."""
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
        state = self._bring(slot, 0, tile.state, tile.state.tensor)
        param = self._bring(
            slot, window.param_offset, params, part_of(params, tile, itemsize), needed=needs_params
        )
        grad_itemsize = self._gradients.dtype_of(tile.group).itemsize
        grad = self._bring(slot, window.grad_offset, grads, part_of(grads, tile, grad_itemsize))
        # What leaves the slot; the copies to the device, these and any that may still read the parameters at home; and
        # what compute was told: it made the gradients, and may still read the parameters.
        update.wait_for(slot.free)
        update.wait_for(self._streams.fetch.record())
        update.wait_for(self._streams.compute.record())
        with update.running():
            step(OnDevice(tile, state, param, grad))
        end = self._stepped = update.record()
        if tile.state.on_host and state.numel():
            end = self._return(tile.state.tensor, state, end)
        if params.on_host:
            target = part_of(params, tile, itemsize)
            for part in [range(tile.numel)] if needs_params else stepped:
                here = slice(part.start * itemsize, part.stop * itemsize)
                end = self._return(target[here], param[here], end)
        slot.free = end
        self._slots.rotate(-1)
        self._under_way.append(end)

    def show(self) -> None:
        """What compute is told from now on sees what was stepped in device memory."""
        if self._stepped is not None:
            self._copies.hold_compute(self._stepped, KIND)

    def publish(self) -> None:
        """What is copied to the device from now on was stepped. The CPU does not wait."""
        if self._returned is not None:
            self._streams.fetch.wait_for(self._returned)

    def settle(self) -> None:
        """Wait until the device has done with host memory."""
        for last in (self._stepped, self._returned):
            if last is not None:
                with self._stalls.waiting_for(COPIES_OF + KIND):
                    last.wait()
        self._stepped = self._returned = None
        self._under_way.clear()

    def _bring(
        self, slot: _Slot, offset: int, home: Home, here: Tensor | None, *, needed: bool = True
    ) -> Tensor:
        """Bytes of ``home`` in device memory: ``here``, or their place in ``slot``, copied there if ``needed``."""
        assert here is not None and self._memory.tensor is not None
        if home.on_device:
            return here
        start = slot.offset + offset
        there = self._memory.tensor[start : start + here.numel()]
        if needed and here.numel():
            self._copies.to_device(there, here, after=[slot.free], kind=KIND)
        return there

    def _return(self, home: Tensor | None, changed: Tensor, stepped: Event) -> Event:
        """Copy bytes back to where they live; the end of that."""
        assert home is not None
        self._returned = self._copies.to_host(home, changed, after=[stepped], kind=KIND)
        return self._returned
