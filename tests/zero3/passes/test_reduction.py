"""Gradients on their way between ranks: in the rooms that the plan has for them, every one, and in the agreed order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.tiering.workloads import PLENTY, example
from tiering.errors import PlacementError
from tiering.placement.group_sizes import GroupSizes
from tiering.placement.placement import make_plan
from tiering.placement.plan import Budgets
from tiering.placement.slots import SMALLEST_TILE
from tiering.placement.workload import Tier, Workload
from tiering.storage.arena import Arena
from zero3.params.layout import FlatLayout, Piece
from zero3.passes.reduction import GradientReducer

DTYPES = {2: torch.bfloat16, 4: torch.float32}
RANKS = 2
LARGE = 1 << 30


@dataclass(eq=False)
class Group:
    """As much of a ParamGroup as is reduced: one parameter, all of it trainable."""

    index: int
    numel: int
    parent: int | None = None
    persistent: bool = False
    in_fp32: bool = False
    beside: int | None = None
    param: nn.Parameter = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"g{self.index}"
        self.entries = () if self.persistent else (self.name,)
        self.piece = Piece(self.index, self.name, 0, (self.numel,), self.numel, self.numel > 0)
        self.layout = FlatLayout((self.piece,), self.numel, self.numel)
        self.param = nn.Parameter(torch.empty(self.numel))


class Ranks:
    """Collectives that carry nothing: they remember what was sent, in which order; the parts of a group together."""

    row_nbytes = 0

    def __init__(self) -> None:
        self.world = SimpleNamespace(partition_rank=0, partition_size=RANKS)
        self.tables = self
        self.sent: list[tuple[str, Tensor]] = []
        self.under_way: list[tuple[Tensor, Tensor]] = []

    def exchange(self, received: Tensor, sent: Tensor, label: str) -> Any:
        _, name, part = label.split("'")
        whole = sent.float().view(RANKS, -1).clone()
        if part and not part.startswith(", elements 0 "):
            before, earlier = self.sent.pop()
            assert before == name
            whole = torch.cat((earlier.view(RANKS, -1), whole), 1)
        self.sent.append((name, whole.view(-1)))
        self.under_way.append((received, sent))
        return sent, sent.clone()

    def announce(self, label: str, *, foreseen: bool) -> None: ...

    def gather(self, whole: Tensor, shard: Tensor, label: str) -> Any:
        return whole, whole.clone()

    def is_done(self, pending: Any) -> bool:
        return False  # as late as it can be

    def finish(self, pending: Any, cause: str) -> None:
        sent, as_it_was = pending
        assert torch.equal(sent, as_it_was), "overwritten while it was sent"

    def table(self, mine: Tensor, label: str) -> Tensor:
        return torch.stack([mine] * RANKS)


class Store:
    """The GradientStore of a rank whose gradients go nowhere."""

    last_micro_batch = True

    def add_reduced(self, group: Group, parts: list[Tensor], factor: float, first: int) -> None: ...
    def final(self, group: Group) -> None: ...
    def close(self, group: Group) -> None: ...
    def close_all(self) -> None: ...
    def mark_received(self, received: Sequence[int]) -> None: ...
    def register_reducer(self, reducer: GradientReducer) -> None:
        self._reducer = reducer

    def reset(self) -> None:
        self._reducer.forget()

    def forget_squares(self, group: Group) -> None: ...


def reducer(
    groups: list[Group], stage: int, itemsize: int, bucket: int = LARGE, *, tight: bool
) -> tuple[GradientReducer, Ranks]:
    """In bf16, sent with ``itemsize``. ``tight``: with the least room that a plan can have."""
    load = replace(load_of(groups, stage, itemsize), reduce_bucket=bucket)
    most = make_plan(load, Budgets(PLENTY, 0, 0)).total(Tier.DEVICE)
    try:
        room = make_plan(load, Budgets(most - tight, 0, 0)).reduction
    except PlacementError:  # there is no more than the least, or nothing at all
        room = make_plan(load, Budgets(most, 0, 0)).reduction
    arenas = {name: Arena.map(getattr(room, name), name) for name in ("opened", "collected", "exchanged")}
    dtypes = [torch.float32 if group.in_fp32 else torch.bfloat16 for group in groups]
    local = [torch.empty(g.numel, dtype=dtype) for g, dtype in zip(groups, dtypes, strict=True)]
    tiers = SimpleNamespace(reduction=arenas, device=torch.device("cpu"), device_is_host=True)
    ranks = Ranks()
    return GradientReducer(
        groups, Store(), ranks, tiers, DTYPES[itemsize], local if stage <= 1 else None, stage, room.bucket
    ), ranks  # type: ignore[arg-type]


def load_of(groups: list[Group], stage: int, itemsize: int) -> Workload:
    sizes = tuple(
        GroupSizes(
            group.name,
            (4 if group.in_fp32 else 2) * group.numel,
            group.numel,
            group.parent,
            group.persistent,
            fp32=group.in_fp32,
        )
        for group in groups
    )
    load = example(groups=sizes, offload_param=Tier.DEVICE, offload_optimizer=Tier.DEVICE)
    return replace(load, world_size=RANKS, stage=stage, reduce_itemsize=itemsize)


def arrive(reducer: GradientReducer, group: Group, value: float) -> None:
    group.param.grad = torch.full((group.numel,), value)
    reducer.accumulate(group, group.piece, group.param)


@st.composite
def models(draw: st.DrawFn) -> list[Group]:
    groups: list[Group] = []
    for index in range(draw(st.integers(1, 6))):
        parent = draw(st.none() | st.integers(0, index - 1)) if index else None
        tiles = draw(st.integers(0, 10))
        persistent, in_fp32 = draw(st.integers(0, 5)) == 0, draw(st.integers(0, 3)) == 0
        groups.append(Group(index, RANKS * tiles * SMALLEST_TILE, parent, persistent, in_fp32))
    return groups


kinds = st.sampled_from(
    [
        (stage, itemsize, bucket)
        for stage in range(4)
        for itemsize in (2, 4)
        for bucket in (LARGE, 3 * RANKS * SMALLEST_TILE)
    ]
)


@settings(deadline=None, max_examples=80)
@given(groups=models(), kind=kinds, tight=st.booleans(), data=st.data())
def test_a_reduction_can_always_begin(
    groups: list[Group], kind: tuple[int, int, int], tight: bool, data: st.DataObject
) -> None:
    """Whoever gets no gradients here, in this backward or in the one before."""
    reducing, ranks = reducer(groups, *kind, tight=tight)
    for _ in range(3):
        ranks.sent.clear()
        here = [group for group in reversed(groups) if group.numel and data.draw(st.booleans())]
        for group in here:
            arrive(reducing, group, 1.0)
            reducing.final(group)
        reducing.close_all()
        reducing.reset()
        assert sorted(name for name, _ in ranks.sent) == sorted(group.name for group in groups if group.numel)
        assert [name for name, sent in ranks.sent if sent.eq(1).all()] == in_turn(here, groups)
        assert sum(sent.any().item() for _, sent in ranks.sent) == len(here)


def in_turn(here: list[Group], groups: list[Group]) -> list[str]:
    """Those that stay open until the end of backward come last."""
    parents = {group.parent for group in groups}
    return [g.name for g in sorted(here, key=lambda g: g.persistent or g.index in parents)]


@settings(deadline=None, max_examples=80)
@given(groups=models(), kind=kinds.filter(lambda kind: kind[0] > 0), tight=st.booleans(), data=st.data())
def test_no_gradient_is_lost_in_any_order_of_backward(
    groups: list[Group], kind: tuple[int, int, int], tight: bool, data: st.DataObject
) -> None:
    """All of each goes to the others, with the least room, too. Stage 0 sends means again, which nobody makes here."""
    reducing, ranks = reducer(groups, *kind, tight=tight)
    trained = [group for group in groups if group.numel]
    for _ in range(2):
        ranks.sent.clear()
        expected = {group.name: 0.0 for group in trained}
        for group in data.draw(st.lists(st.sampled_from(trained), max_size=8)) if trained else []:
            arrive(reducing, group, 1.0)
            expected[group.name] += 1.0
            if data.draw(st.booleans()):
                reducing.final(group)
        reducing.close_all()
        reducing.reset()
        total = dict.fromkeys(expected, 0.0)
        for name, sent in ranks.sent:
            assert sent.eq(sent[0]).all()
            total[name] += sent[0].item()
        assert total == expected


def test_buffers_of_unlike_groups_do_not_cut_the_room_in_pieces() -> None:
    """Nothing of the large group is here: zeros are sent, and what is received needs its room beside them."""
    groups = [Group(0, 9 * RANKS * SMALLEST_TILE), Group(1, 5 * RANKS * SMALLEST_TILE)]
    reducing, ranks = reducer([*groups, Group(2, 10 * RANKS * SMALLEST_TILE)], 2, 2, tight=True)
    arrive(reducing, groups[1], 1.0)
    reducing.close_all()
    assert [name for name, _ in ranks.sent] == ["g2", "g1", "g0"]


def test_what_is_reduced_while_it_waits_for_room_comes_late_but_comes() -> None:
    """Backward in the opposite order of what ranks agreed on: to make room, the group goes as it is, without this."""
    groups = [Group(index, RANKS * SMALLEST_TILE) for index in range(3)]
    reducing, ranks = reducer(groups, 2, 2, tight=False)
    for group in groups:
        arrive(reducing, group, 1.0)
    reducing.close_all()
    assert [(name, sent[0].item()) for name, sent in ranks.sent] == [
        ("g2", 0.0),
        ("g1", 1.0),
        ("g0", 1.0),
        ("g2", 1.0),
    ]


def test_a_group_larger_than_the_bucket_is_sent_in_parts_of_each_shard() -> None:
    group = Group(0, 5 * RANKS * SMALLEST_TILE)
    reducing, ranks = reducer([group], 2, 4, 2 * RANKS * SMALLEST_TILE + 1, tight=True)
    values = torch.arange(group.numel, dtype=torch.float32)
    group.param.grad = values.clone()
    reducing.accumulate(group, group.piece, group.param)
    reducing.final(group)
    reducing.close_all()
    assert [received.numel() // (RANKS * SMALLEST_TILE) for received, _ in ranks.under_way] == [2, 2, 1]
    ((_, sent),) = ranks.sent
    assert torch.equal(sent, values)
