"""The size of a model for the planner: its groups, their layouts, and the Workload of these and a configuration.

Only names, shapes and dtypes are read, so the model may be on the meta device.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from tiering.config.training import TieringConfig
from tiering.placement.configured import StateKept, largest_group, make_workload, settle_dtypes
from tiering.placement.group_sizes import GroupSizes
from tiering.placement.tenants import activations
from tiering.placement.workload import Workload
from zero3.device.home import NvmePaths
from zero3.device.storages import can_exchange
from zero3.params.grouping import GroupMembers, block_names, computes_backward, form_groups, leaf_modules
from zero3.params.layout import FlatLayout, expert_slices, lay_out, product
from zero3.params.precision import COMPUTE_DTYPES, keeps_dtype, kept_in_fp32
from zero3.passes.gradient_parts import tied_in
from zero3.setup.optimizer_choice import OptimizerChoice

MOST_CUTS = 3
"""Sizes of blocks between which a plan chooses those that are cut."""


@dataclass(frozen=True)
class SizedModel:
    """A model cut into groups, with the dtypes in which it computes, accumulates and sends gradients.

    ``members`` and ``layouts`` follow ``workload.groups``. Parameters in ``kept_in_fp32`` stay fp32.
    """

    members: list[GroupMembers]
    layouts: list[FlatLayout]
    compute: torch.dtype
    grad_dtype: torch.dtype
    reduce_dtype: torch.dtype
    workload: Workload
    kept_in_fp32: frozenset[nn.Parameter]

    def dtype_of(self, members: GroupMembers) -> torch.dtype:
        """The dtype of the flat tensor of a group."""
        return _dtype_of(members, self.compute)

    @property
    def own_dtypes(self) -> dict[torch.dtype, int]:
        """Bytes of the frozen parameters that keep their dtype, by dtype."""
        nbytes: Counter[torch.dtype] = Counter()
        for layout in self.layouts:
            for piece in layout.pieces:
                if piece.own_dtype is not None:
                    nbytes[piece.own_dtype] += product(piece.shape) * piece.own_dtype.itemsize
        return dict(nbytes)


def size_up(
    model: nn.Module,
    config: TieringConfig,
    chosen: OptimizerChoice,
    *,
    on_gpu: bool,
    world_size: int,
    largest: int | None = None,
) -> SizedModel:
    """Cut ``model`` into groups and compute their sizes on each of ``world_size`` ranks.

    Blocks with more than ``largest`` elements are cut into their modules.

    Raises ConfigError for an offload that the device, a GPU or a CPU, does not support.
    """
    whole_groups = chosen.rule is None
    compute, grad, reduce = (
        COMPUTE_DTYPES[name] for name in settle_dtypes(config, whole_groups=whole_groups)
    )
    leaves = leaf_modules(model, config.zero.leaf_module)
    in_fp32 = kept_in_fp32(model, config)
    trained = chosen.trained
    # With several ranks all ranks gather the same groups, whatever their tokens are routed to.
    threshold, routed = config.zero.persistence_threshold, world_size == 1
    members = form_groups(
        model,
        threshold,
        leaves,
        in_fp32,
        trained,
        routed=routed,
        largest=largest,
        together=config.zero.granularity_threshold,
    )
    layouts = [
        lay_out(
            [(i, name, tuple(p.shape), p in trained) for i, name, p in group.params],
            _dtype_of(group, compute).itemsize,
            world_size,
            {i: p.dtype for i, _, p in group.params if keeps_dtype(p)},
        )
        for group in members
    ]
    tied = {param for param in tied_in(model) if param in trained}
    workload = make_workload(
        config,
        (
            _sizes_of(group, layout, compute, is_tied=any(param in tied for _, _, param in group.params))
            for group, layout in zip(members, layouts, strict=True)
        ),
        StateKept(chosen.state_tensors, chosen.split, chosen.moments.itemsize, whole_groups),
        on_gpu=on_gpu,
        world_size=world_size,
        fetch_by_copy=on_gpu or not can_exchange(),
        others=activations(config),
    )
    return SizedModel(members, layouts, compute, grad, reduce, workload, in_fp32)


def _sizes_of(group: GroupMembers, layout: FlatLayout, compute: torch.dtype, *, is_tied: bool) -> GroupSizes:
    """The sizes of ``group``; ``is_tied`` says whether several modules use a trained parameter of it."""
    return GroupSizes(
        name=group.name,
        param_bytes=layout.numel * _dtype_of(group, compute).itemsize,
        trainable_numel=layout.trainable_numel,
        parent=group.parent,
        beside=group.beside,
        persistent=group.persistent,
        uses=len(group.entries) or int(not group.persistent),
        uses_in_backward=_uses_in_backward(group),
        largest_trained=max((piece.numel for piece in layout.pieces if piece.trainable), default=0),
        parts=len(group.entries) if is_tied else 1,
        fp32=group.in_fp32,
        routed=group.routing is not None,
        expert_bytes=_expert_bytes(group, layout, compute),
    )


def sizes_of_cuts(model: nn.Module, config: TieringConfig, world_size: int) -> list[int | None]:
    """The elements above which blocks are cut into their modules, in the order in which a plan tries them.

    The first is that of the configuration. Blocks that run over chunks of rows are not cut further: each chunk would
    fetch their modules again.
    """
    first = largest_group(config, world_size)
    if config.tiering.block_rows is not None:
        return [first]
    modules = dict(model.named_modules())
    blocks = {sum(param.numel() for param in modules[name].parameters()) for name in block_names(model)}
    smaller = sorted(blocks, reverse=True)[1 : 1 + MOST_CUTS]
    return [first, *(size for size in smaller if first is None or size < first), 0]


def _expert_bytes(group: GroupMembers, layout: FlatLayout, compute: torch.dtype) -> int:
    """The most bytes that one of the fused experts of ``group`` needs, 0 if it has none."""
    if group.routing is None or not group.routing.fused:
        return 0
    experts = expert_slices(layout, _dtype_of(group, compute).itemsize, group.routing.count)
    return max(sum(len(each.pages) for each in slices) for slices in experts)


def _uses_in_backward(group: GroupMembers) -> int | None:
    """The uses of ``group`` that backward repeats, None if it repeats all."""
    count = sum(map(computes_backward, group.entries))
    return None if count == len(group.entries) else count


def _dtype_of(group: GroupMembers, compute: torch.dtype) -> torch.dtype:
    return torch.float32 if group.in_fp32 else compute


def nvme_paths(config: TieringConfig) -> NvmePaths:
    """The directories of the swap space that ``config`` names."""
    return NvmePaths(
        config.zero.offload_param.swap_directories, config.zero.offload_optimizer.swap_directories
    )
