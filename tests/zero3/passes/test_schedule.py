"""Prefetch and the pass schedule against every order of events, on groups that only remember what was asked."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.zero3.passes.autograd_model import Gradients
from zero3.params.layout import FlatLayout
from zero3.params.param_group import Residency
from zero3.passes import pass_state
from zero3.passes import schedule as schedule_module
from zero3.passes.prefetch import Prefetcher
from zero3.passes.schedule import PassSchedule


class Device:
    """Room for so many groups at once, of which so many may be on their way (None: any number)."""

    def __init__(self, room: int, window: int | None = None) -> None:
        self.room = room
        self.window = window
        self.log: list[tuple[str, str]] = []


class FakeGroup:
    """Stands for a ParamGroup: counts against the room of the device, checks each transition."""

    def __init__(self, name: str, device: Device, parent: int | None = None) -> None:
        self.name = name
        self.device = device
        self.parent = parent
        self.beside: int | None = None
        self.residency = Residency.SHARDED
        self.moves = False  # saves no tensors
        self.sharded = self.stays = False
        self.params: list[Any] = []
        self.entries: list[Any] = []
        self.layout = FlatLayout((), 0, 0)
        self.storage_key = id(self)
        self.is_shown = False
        self.through_window = device.window is not None
        self.routing = None
        self.same_expert = ()

    def advance(self) -> None:
        pass

    def unshard(self, *, wait: bool = False) -> bool:
        if self.residency is not Residency.SHARDED:
            return True
        if self.device.room == 0 or self.device.window == 0:
            assert not wait, f"{self.name} can never get room"
            return False
        self.device.room -= 1
        if self.device.window is not None:
            self.device.window -= 1
        self.residency = Residency.FETCHING
        self.device.log.append(("fetch", self.name))
        return True

    def wait_for_unshard(self) -> None:
        assert self.residency is not Residency.SHARDED
        self._leave_window()
        self.residency = Residency.UNSHARDED

    def show(self) -> None:
        assert self.residency is Residency.UNSHARDED
        self.is_shown = True

    def hide(self) -> None:
        self.is_shown = False

    def reshard(self, *, keep_edits: bool = True) -> None:
        self.is_shown = False
        if self.residency is not Residency.SHARDED:
            self._leave_window()
            self.device.room += 1
            self.device.log.append(("free", self.name))
        self.residency = Residency.SHARDED

    def _leave_window(self) -> None:
        if self.residency is Residency.FETCHING and self.device.window is not None:
            self.device.window += 1

    @property
    def usable(self) -> bool:
        return self.residency is Residency.UNSHARDED


class FakeGradients(Gradients):
    """Notes what is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.closed: list[str] = []
        self.last: list[str] = []  # of these, those that backward should not come back to

    def close(self, group: Any, *, last: bool) -> None:
        self.closed.append(group.name)
        self.last += [group.name] if last else []

    def close_all(self) -> None:
        self.closed.append("all")


@pytest.fixture
def end_callbacks(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    callbacks: list[Callable[[], None]] = []

    def queue(callback: Callable[[], None]) -> Callable[[], None]:
        callbacks.append(callback)
        return lambda: None  # no thread of autograd runs anything

    monkeypatch.setattr(schedule_module, "call_at_end_of_backward", queue)
    return callbacks


class Accumulates:
    """A listener whose backwards update nothing."""

    def on_backward(self) -> None:
        pass

    def on_first_gradient(self) -> bool:
        return False

    def on_gradient(self) -> None: ...

    def on_group_done(self, group: FakeGroup, final: bool) -> None:
        pass

    def on_end_of_backward(self) -> None:
        pass


def make(
    count: int, room: int, *, root: bool = False, window: int | None = None
) -> tuple[Device, list[FakeGroup], PassSchedule, FakeGradients]:
    device = Device(room, window)
    groups = [FakeGroup(f"g{i}", device, parent=count if root else None) for i in range(count)]
    if root:
        groups.append(FakeGroup("root", device))
    gradients = FakeGradients()
    passes = PassSchedule(groups, Prefetcher(), gradients, Accumulates())
    return device, groups, passes, gradients


def call(passes: PassSchedule, group: FakeGroup) -> None:
    passes.pre_forward(group)
    assert group.usable and group.is_shown
    passes.post_forward(group)


def forward(passes: PassSchedule, groups: list[FakeGroup], *, training: bool = True) -> None:
    passes.begin_forward(training)
    for group in groups:
        call(passes, group)
    passes.end_forward()


def backward(passes: PassSchedule, group: FakeGroup) -> None:
    passes.pre_backward(group)
    assert group.usable


def one_pass(passes: PassSchedule, groups: list[FakeGroup], end: list[Callable[[], None]]) -> None:
    forward(passes, groups)
    for group in reversed(groups):
        backward(passes, group)
    end.pop()()


@pytest.mark.parametrize("window", [None, 2])
def test_the_second_pass_fetches_ahead_in_the_recorded_order(
    end_callbacks: list[Callable[[], None]], window: int | None
) -> None:
    device, groups, passes, _ = make(4, room=2, window=window)
    one_pass(passes, groups, end_callbacks)
    assert [name for kind, name in device.log if kind == "fetch"] == [
        *("g0", "g1", "g2", "g3"),
        *("g3", "g2", "g1", "g0"),
    ]
    device.log.clear()
    passes.begin_forward(True)
    passes.pre_forward(groups[0])
    assert device.log == [("fetch", "g0"), ("fetch", "g1")], "the next group is not on its way"
    passes.post_forward(groups[0])
    assert device.log[2:] == [("free", "g0"), ("fetch", "g2")]


def test_each_pass_fetches_every_group_twice_whatever_the_room(
    end_callbacks: list[Callable[[], None]],
) -> None:
    for room in (1, 2, 3, 5):
        device, groups, passes, gradients = make(4, room=room)
        for _ in range(3):
            device.log.clear()
            one_pass(passes, groups, end_callbacks)
            fetched = sorted(name for kind, name in device.log if kind == "fetch")
            assert fetched == sorted(["g0", "g1", "g2", "g3"] * 2), f"room {room}"
            assert device.room == room, "a group is still unsharded after backward"
        assert gradients.closed[-5:] == ["g3", "g2", "g1", "g0", "all"]


@pytest.mark.parametrize("window", [1, 2, 3])
def test_what_passes_a_window_is_never_fetched_in_vain(
    end_callbacks: list[Callable[[], None]], window: int
) -> None:
    """A group in use holds none of it, but needs it again in backward: what comes later must not be there then."""
    for room in (2, 3, 5, 10):
        device, groups, passes, _ = make(4, room=room, root=True, window=window)
        *blocks, root = groups
        for _ in range(3):
            device.log.clear()
            passes.begin_forward(True)
            passes.pre_forward(root)
            for group in (blocks[0], *blocks):  # the first is used twice in a row
                call(passes, group)
            passes.post_forward(root)
            passes.end_forward()
            for group in (root, *reversed(blocks)):
                backward(passes, group)
            end_callbacks.pop()()
            fetched = sorted(name for kind, name in device.log if kind == "fetch")
            assert fetched == sorted(["g0", *["g0", "g1", "g2", "g3", "root"] * 2]), f"room {room}"
        assert (device.room, device.window) == (room, window)


def test_an_enclosing_group_stays_until_backward_ends(end_callbacks: list[Callable[[], None]]) -> None:
    _, groups, passes, gradients = make(2, room=2, root=True)
    first, second, root = groups
    passes.begin_forward(True)
    passes.pre_forward(root)
    call(passes, first)
    call(passes, second)
    assert root.usable
    passes.post_forward(root)
    backward(passes, root)
    backward(passes, second)
    assert root.usable
    backward(passes, first)
    assert root.usable
    assert gradients.closed == ["g1"]
    end_callbacks.pop()()
    assert not root.usable
    assert sorted(gradients.closed[1:]) == ["all", "g0", "root"]


def test_a_changed_order_only_costs_prefetch(end_callbacks: list[Callable[[], None]]) -> None:
    device, groups, passes, _ = make(5, room=3)
    chosen = random.Random(4)
    for _ in range(50):
        one_pass(passes, [g for g in groups if chosen.random() < 0.6] or groups[:1], end_callbacks)
        forward(passes, chosen.sample(groups, 3), training=False)
        passes._prefetcher.forget()
        assert device.room == 3


def test_recomputation_and_repeated_use_inside_backward(end_callbacks: list[Callable[[], None]]) -> None:
    device, groups, passes, _ = make(3, room=2)
    forward(passes, [groups[0], groups[1], groups[0], groups[2]])
    backward(passes, groups[2])
    backward(passes, groups[0])
    call(passes, groups[0])  # recomputed: the group is live and stays
    assert groups[0].usable
    call(passes, groups[1])  # recomputed before its own backward: freed again
    assert not groups[1].usable
    backward(passes, groups[1])
    backward(passes, groups[0])
    end_callbacks.pop()()
    assert device.room == 2


def test_a_node_of_another_thread_may_have_the_same_number(
    end_callbacks: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reentrant checkpointing on a GPU: what autograd's thread recomputes, it numbers anew."""
    _, groups, passes, gradients = make(2, room=2)
    forward(passes, groups)
    task, node = 1, SimpleNamespace(_sequence_nr=lambda: 7)  # of the checkpoint, made by the forward's thread
    monkeypatch.setattr(pass_state, "graph_task", lambda: task)
    monkeypatch.setattr(torch._C, "_current_autograd_node", lambda: node)
    call(passes, groups[1])
    task = 2
    passes.pre_backward(groups[1], range(5, 9))
    task = 1
    call(passes, groups[0])
    assert gradients.last == ["g1"], "a block that is through was taken for one that recomputes others"


def test_an_abandoned_pass_frees_everything(end_callbacks: list[Callable[[], None]]) -> None:
    device, groups, passes, _ = make(3, room=3)
    one_pass(passes, groups, end_callbacks)
    for stop in range(6):
        passes.begin_forward(True)  # and nothing tells of its end
        events = [lambda g=g: call(passes, g) for g in groups]
        events += [lambda g=g: backward(passes, g) for g in reversed(groups)]
        for event in events[: stop + 1]:
            event()
        passes.pre_forward(groups[1])
        passes.abandon()
        assert device.room == 3
        assert not passes.state.in_backward
        end_callbacks.clear()
    one_pass(passes, groups, end_callbacks)
    assert device.room == 3
