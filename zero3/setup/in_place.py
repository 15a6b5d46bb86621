"""Decides which frozen groups are read in place: from the files of weights, without a copy in swap space.

That is possible for a group whose parameters are all stored with the bytes that compute needs: in the same dtype, as
whole tensors or one after the other. The decision is made before the plan, because the plan reserves no swap space for
these groups; a group that the plan keeps in memory is read into memory once, as without files.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from tiering import _logs
from tiering.config.fields import format_size
from tiering.config.training import TieringConfig
from tiering.host import drives
from tiering.placement.group_sizes import InFiles
from tiering.placement.plan import Plan
from tiering.placement.workload import Tier, Workload
from tiering.storage.descriptors import close_alone
from tiering.storage.file_system import FileVersion, open_for_reading
from tiering.storage.read_only import FileRange, ReadLayout, cut_ranges
from zero3.building.encoded_weights import StoredValues
from zero3.building.weights import FileSource, Matched
from zero3.params.grouping import GroupMembers
from zero3.params.layout import ExpertSlice, FlatLayout, expert_slices, shard
from zero3.ranks.collectives import Collectives
from zero3.ranks.joining import World
from zero3.setup.model_size import SizedModel

log = logging.getLogger(__name__)

Ranges = tuple[FileRange, ...]


@dataclass(frozen=True)
class InPlace:
    """By the index of each group that can be read in place: where the files have this rank's part, and what it needs.

    ``versions`` are those of the files.
    """

    ranges: Mapping[int, Ranges] = field(default_factory=dict)
    needs: Mapping[int, InFiles] = field(default_factory=dict)
    versions: Mapping[Path, FileVersion] = field(default_factory=dict)

    def applied_to(self, load: Workload) -> Workload:
        """``load``, whose groups in files need no swap space."""
        if not self.needs:
            return load
        groups = (replace(group, in_files=self.needs.get(at)) for at, group in enumerate(load.groups))
        return replace(load, groups=tuple(groups))

    def parameters(self, sized: SizedModel, plan: Plan) -> set[nn.Parameter]:
        """The parameters that ``plan`` leaves in their files."""
        return {param for at in self._used(plan) for _, _, param in sized.members[at].params}

    def report(self, plan: Plan) -> None:
        """Log what is read in place, and from where."""
        used = self._used(plan)
        if used:
            files = {each.file for at in used for each in self.ranges[at]}
            log.log(
                _logs.once(logging.INFO),
                "%s of frozen parameters are read in place from %d files in %s: leave them alone while the run reads"
                " them",
                *(format_size(plan.in_place_bytes), len(files), ", ".join(_directories(files))),
            )

    def _used(self, plan: Plan) -> list[int]:
        return [at for at in self.ranges if plan.param_tiers[at] is Tier.NVME]


@dataclass(frozen=True)
class Cuts:
    """A model in one or several cuts into groups, the coarsest first, each with what can be read in place."""

    models: Sequence[tuple[SizedModel, InPlace]]

    @property
    def load(self) -> Workload:
        """The workload, with all cuts."""
        first, *finer = (in_place.applied_to(sized.workload) for sized, in_place in self.models)
        return replace(first, finer=tuple(load.groups for load in finer))

    def of(self, plan: Plan) -> tuple[SizedModel, InPlace]:
        """The cut that ``plan`` has chosen."""
        for sized, in_place in self.models:
            if in_place.applied_to(sized.workload).groups == plan.workload.groups:
                return sized, in_place
        raise AssertionError("the plan is of another model")


def find_in_place(
    sized: SizedModel,
    loaded: Matched | None,
    config: TieringConfig,
    world: World,
    collectives: Collectives | None,
) -> InPlace:
    """The groups of ``sized`` that can be read in place from the files of ``loaded``, on all ranks alike."""
    wanted = config.tiering.weights_in_place
    if loaded is None or wanted is False or sized.workload.offload_param is not Tier.NVME:
        return InPlace()
    versions = loaded.files.versions
    sizes = {path: version.nbytes for path, version in versions.items()}
    ranges: dict[int, Ranges] = {}
    needs: dict[int, InFiles] = {}
    for at, (members, layout) in enumerate(zip(sized.members, sized.layouts, strict=True)):
        if members.persistent or layout.trainable_numel:
            continue
        found = _of_group(sized, at, loaded.sources, sizes, world)
        if found is not None:
            ranges[at], needs[at] = found
    files = {each.file for group_ranges in ranges.values() for each in group_ranges}
    reason = "" if wanted is True or not files else _unsuitable(files)
    if collectives is not None:
        row = torch.tensor([bool(reason)], device="cpu")
        if collectives.tables.table(row, "compare where weights can be read").any() and not reason:
            reason = "another rank cannot read them in place"
    if reason:
        log.log(
            _logs.once(logging.INFO),
            "frozen weights are copied to swap space, because %s; tiering.weights_in_place true reads them in place",
            reason,
        )
        return InPlace()
    if collectives is not None:
        collectives.tables.check_same("files of frozen weights", _lines(sized, ranges, loaded))
    return InPlace(ranges, needs, versions)


def _of_group(
    sized: SizedModel,
    at: int,
    sources: Mapping[nn.Parameter, StoredValues],
    sizes: Mapping[Path, int],
    world: World,
) -> tuple[Ranges, InFiles] | None:
    """Where the files have this rank's part of the group ``at``, and what the rank that needs most needs.

    None if they have not all parts of all ranks.
    """
    members, layout, group = sized.members[at], sized.layouts[at], sized.workload.groups[at]
    dtype, sharded = sized.dtype_of(members), sized.workload.shards_params(group)
    of_ranks: list[Ranges] = []
    for rank in range(world.partition_size) if sharded else (0,):
        part = shard(layout, world.partition_size, rank) if sharded else layout
        stored = stored_ranges(part, members, dtype, sources)
        if stored is None:
            return None
        of_ranks.append(stored)
    if group.expert_bytes:
        assert members.routing is not None
        experts = expert_slices(layout, dtype.itemsize, members.routing.count)
        need = _need_of_experts(experts, of_ranks[0], sizes)
    else:
        nbytes = sized.workload.home_bytes(group)
        layouts = [ReadLayout.of(each, sizes, nbytes) for each in of_ranks]
        need = InFiles(max(each.nbytes for each in layouts), max(each.room for each in layouts) - nbytes)
    return of_ranks[world.partition_rank if sharded else 0], need


def stored_ranges(
    layout: FlatLayout,
    members: GroupMembers,
    dtype: torch.dtype,
    sources: Mapping[nn.Parameter, StoredValues],
) -> Ranges | None:
    """Where files have the bytes of a flat tensor of ``dtype`` with ``layout``; None if they have not all of them."""
    params = {index: param for index, _, param in members.params}
    ranges: list[FileRange] = []
    for piece in sorted(layout.pieces, key=lambda piece: piece.start):
        source, own_dtype = sources.get(params[piece.index]), piece.own_dtype or dtype
        if not isinstance(source, FileSource) or source.dtype is not own_dtype:
            return None
        own = piece.own_elements(piece.first, piece.numel, dtype.itemsize)
        start, end = own.start * own_dtype.itemsize, own.stop * own_dtype.itemsize
        at, before = piece.start * dtype.itemsize, 0
        for part in source.parts:
            first, last = max(start - before, 0), min(end - before, part.nbytes)
            if first < last:
                ranges.append(FileRange(part.name, part.file, part.offset + first, last - first, at))
                at += last - first
            before += part.nbytes
    return tuple(ranges)


def _need_of_experts(
    experts: Iterable[Iterable[ExpertSlice]], ranges: Ranges, sizes: Mapping[Path, int]
) -> InFiles:
    """The need of fused experts, which are read one by one: all of their reads, and the slack of one expert."""
    read = slack = 0
    for expert in experts:
        layouts = [
            (
                len(part.pages),
                ReadLayout.of(cut_ranges(ranges, part.pages.start, part.pages.stop), sizes, len(part.pages)),
            )
            for part in expert
        ]
        read += sum(each.nbytes for _, each in layouts)
        slack = max(slack, sum(each.room - nbytes for nbytes, each in layouts))
    return InFiles(read, slack)


def _unsuitable(files: Iterable[Path]) -> str:
    """The reason why reading ``files`` in every pass would be slow, or take memory; "" if there is none."""
    for directory in _directories(files):
        backing = drives.behind(Path(directory))
        if backing.file_system.kind in ("network", "memory"):
            return f"{directory} is on {backing.file_system.type}"
        if any(disk.spins for disk in backing.disks):
            return f"{directory} is on a rotating disk"
    for file in sorted(files):
        fd, direct = open_for_reading(file)
        close_alone(fd)
        if not direct:
            return f"the file system of {file} refuses O_DIRECT"
    return ""


def _directories(files: Iterable[Path]) -> list[str]:
    return sorted({str(file.parent) for file in files})


def _lines(sized: SizedModel, groups: Iterable[int], loaded: Matched) -> Iterator[str]:
    """A line for each stored tensor of ``groups``: the plan depends on its place in the file."""
    for at in groups:
        for _, name, param in sized.members[at].params:
            for part in loaded.sources[param].parts:
                yield f"{name!r} at byte {part.offset} of {part.file.name}"
