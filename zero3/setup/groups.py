"""Makes the ParamGroups of one rank: their homes, their shards, and their offsets in the working arena."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from tiering.placement.group_sizes import GroupSizes
from tiering.placement.tenants import PARAMETERS
from tiering.placement.updates import hidden_groups
from tiering.placement.workload import Tier
from zero3.device.home import Home
from zero3.device.tiers import Tiers
from zero3.params.fused_experts import slice_up
from zero3.params.grouping import GroupMembers, Routing
from zero3.params.layout import ExpertSlice, FlatLayout, expert_slices, shard, shard_ranges
from zero3.params.param_group import GroupMemory, ParamGroup
from zero3.ranks.collectives import Collectives
from zero3.ranks.joining import World
from zero3.setup.in_place import InPlace
from zero3.setup.model_size import SizedModel


def make_groups(
    sized: SizedModel, tiers: Tiers, collectives: Collectives | None, in_place: InPlace
) -> list[ParamGroup]:
    """The groups of ``sized`` with homes on ``tiers``; ``collectives`` gather those that are sharded over ranks."""
    load = tiers.plan.workload
    offsets, hidden = _offsets_of_parents(tiers), hidden_groups(tiers.plan)
    groups = []
    for index, (members, layout) in enumerate(zip(sized.members, sized.layouts, strict=True)):
        dtype = torch.float32 if members.in_fp32 else sized.compute
        sizes = load.groups[index]
        sharded = load.shards_params(sizes)
        home = _make_home(index, sizes, layout, tiers, in_place)
        shard_layout, shard_home = layout, home
        if collectives is not None and load.stage >= 1:
            world = collectives.world
            shard_layout = shard(
                layout, world.partition_size, world.partition_rank, trainable_only=not sharded
            )
            if not sharded:
                shard_home = _shard_of_home(home, layout, dtype, world)
        memory = GroupMemory(home, shard_layout, shard_home, offsets.get(index), index in hidden)
        groups.append(
            ParamGroup(index, members, layout, memory, dtype, tiers, collectives if sharded else None)
        )
    return groups


def slice_experts(groups: list[ParamGroup], tiers: Tiers) -> None:
    """Make a group for each expert of each parameter of the ``groups`` with fused experts that move.

    Each has one parameter, which is no parameter of the model, and its home is a part of the home of the parameter that
    it is a slice of. Their indices go on behind those of ``groups``.
    """
    made: list[ParamGroup] = []
    for group in groups:
        if group.routing is None or not group.routing.fused or not group.moves:
            continue
        experts = expert_slices(group.layout, group.dtype.itemsize, group.routing.count)
        routing = replace(group.routing, count=group.routing.count * len(group.params))
        for parts in experts:
            first = len(made)
            for part in parts:
                made.append(_make_slice(group, part, len(groups) + len(made), routing, tiers))
            group.slices += made[first:]
            for each in made[first:]:
                each.same_expert = made[first:]
        for position, param in enumerate(group.params):
            slice_up(param, [each.params[0] for each in group.slices[position :: len(group.params)]])


def _make_slice(
    group: ParamGroup, part: ExpertSlice, index: int, routing: Routing, tiers: Tiers
) -> ParamGroup:
    piece, itemsize = part.piece, group.dtype.itemsize
    value = torch.empty(1, dtype=group.dtype_of(piece), device=tiers.device).expand(piece.shape)
    param = nn.Parameter(value, requires_grad=False)
    members = GroupMembers(
        piece.name, [(piece.index, piece.name, param)], parent=group.parent, routing=routing
    )
    layout = FlatLayout((piece,), 0, len(part.pages) // itemsize)
    home = group.home.part(part.pages)
    sliced = ParamGroup(
        index, members, layout, GroupMemory(home, layout, home, None), group.dtype, tiers, None
    )
    sliced.adopt_parameters()
    return sliced


def _make_home(index: int, sizes: GroupSizes, layout: FlatLayout, tiers: Tiers, in_place: InPlace) -> Home:
    """The planned home for this rank's parameters of group ``index``."""
    names = tuple(piece.name for piece in layout.pieces)
    nbytes, tier = tiers.plan.workload.home_bytes(sizes), tiers.plan.param_tiers[index]
    if tier is Tier.NVME and sizes.in_files:
        slack = None if sizes.expert_bytes else sizes.in_files.slack
        return tiers.home_in_files(in_place.ranges[index], nbytes, slack, names)
    return tiers.home(tier, nbytes, PARAMETERS, names, kept=tiers.plan.workload.kept_params(sizes))


def _shard_of_home(home: Home, layout: FlatLayout, dtype: torch.dtype, world: World) -> Home:
    """The range of ``home``, which holds the whole group, that this rank steps."""
    assert home.tensor is not None
    trainable = shard_ranges(layout, world.partition_size, world.partition_rank)[0]
    start, stop = trainable.start * dtype.itemsize, trainable.stop * dtype.itemsize
    return Home(home.tensor[start:stop], on_device=home.on_device)


def _offsets_of_parents(tiers: Tiers) -> dict[int, int]:
    """The offsets in the working arena of groups that enclose others, by index: stacked from its end, outermost first.

    These groups stay unsharded while the groups inside them are unsharded and resharded. At any other offset they could
    split the remaining room into ranges that are too small for a group, although the plan has counted enough bytes.
    Of groups with experts, every second one is below the one before, if both and an expert fit: so it is fetched while
    the experts of the one before are called.
    """
    plan = tiers.plan
    load = plan.workload

    def room(at: int) -> int:
        group = load.groups[at]
        return 0 if load.computes_in_place(group, plan.param_tiers[at]) else load.unsharded_bytes(group)

    def stacked_bytes(index: int) -> int:
        """The bytes of the group and of those that lie behind it: of two beside each other, the first one does not."""
        stacked = [
            at for at in load.chain(index) if at == index or load.groups[index].beside != at or at > index
        ]
        return sum(map(room, stacked))

    offsets = {index: tiers.working.capacity - stacked_bytes(index) for index in load.enclosing}
    blocks = dict.fromkeys(
        frozenset(at for at in (index, load.groups[index].beside) if at is not None)
        for index in sorted(load.routing)
    )
    second = frozenset[int]().union(*list(blocks)[1::2])
    below = max((sum(room(at) for at in block) for block in blocks), default=0)
    expert = max((room(index) for index, group in enumerate(load.groups) if group.routed), default=0)
    if min((offsets[at] for at in second), default=0) >= below + expert:
        offsets.update({at: offsets[at] - below for at in second})
    return offsets
