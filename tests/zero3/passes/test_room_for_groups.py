"""What makes way for a group that has no room: and what comes back where nothing can."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tiering.errors import ArenaError
from zero3.params.param_group import Residency
from zero3.passes.pass_state import GroupsInPass
from zero3.passes.room_for_groups import RoomForGroups


class Group(SimpleNamespace):
    """A group of ``numel`` elements that is unsharded at the beginning, or not."""

    def __init__(self, numel: int, residency: Residency) -> None:
        super().__init__(layout=SimpleNamespace(numel=numel), residency=residency)
        self.is_shown = residency is Residency.UNSHARDED

    def reshard(self) -> None:
        self.residency, self.is_shown = Residency.SHARDED, False

    def show(self) -> None:
        self.is_shown = True

    def __hash__(self) -> int:
        return id(self)


@pytest.mark.parametrize(("numels", "room"), [((2, 3), 4), ((3, 2), 4), ((2, 2), 3)])
@pytest.mark.parametrize("running", [0, 1])
def test_a_neighbour_in_use_is_back_after_a_refusal(numels: tuple[int, int], room: int, running: int) -> None:
    group, neighbour = Group(numels[0], Residency.SHARDED), Group(numels[1], Residency.UNSHARDED)
    both = (group, neighbour)

    def acquire(asked: Group) -> None:
        used = sum(each.layout.numel for each in both if each.residency is Residency.UNSHARDED)
        if used + asked.layout.numel > room:
            raise ArenaError("no room")
        asked.residency = Residency.UNSHARDED

    groups: Any = GroupsInPass([])
    groups.progress = {
        each: SimpleNamespace(beside=other, running=running) for each, other in (both, both[::-1])
    }
    prefetcher: Any = SimpleNamespace(acquire=acquire)
    rooms = RoomForGroups(prefetcher, groups, lambda _: None)
    asked: Any = group
    assert not rooms.acquire_with_neighbour(asked)
    if running:
        assert (neighbour.residency, neighbour.is_shown) == (Residency.UNSHARDED, True)
        assert group.residency is Residency.SHARDED
