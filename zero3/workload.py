"""What the planner is told of a model: its groups, their layouts, and the Workload that these and a configuration make.

Only names, shapes and dtypes are read, so a model on the meta device does as well as one in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from tiering.config import TieringConfig
from tiering.errors import ConfigError
from tiering.plan import GroupSizes, Tier, Workload
from zero3.flat_storage import can_exchange
from zero3.groups import GroupMembers, form_groups, leaf_modules
from zero3.optimizer_choice import OptimizerChoice
from zero3.partition import FlatLayout, lay_out
from zero3.precision import COMPUTE_DTYPES
from zero3.tiers import NvmePaths

OFFLOAD_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}


@dataclass(frozen=True)
class SizedModel:
    """A model cut into groups, with the dtypes in which it computes, accumulates and sends gradients.

    ``members`` and ``layouts`` follow ``workload.groups``.
    """

    members: list[GroupMembers]
    layouts: list[FlatLayout]
    compute: torch.dtype
    grad_dtype: torch.dtype
    reduce_dtype: torch.dtype
    workload: Workload


def size_up(
    model: nn.Module, config: TieringConfig, chosen: OptimizerChoice, *, on_gpu: bool, world_size: int
) -> SizedModel:
    """Cut ``model`` into groups and measure them, as each of ``world_size`` ranks with such a device would.

    Raises ConfigError for offloading that such a device cannot do.
    """
    compute = COMPUTE_DTYPES[config.precision]
    grad_dtype = _grad_dtype(config, compute, chosen)
    reduce_dtype = _reduce_dtype(config, compute, grad_dtype)
    leaves = leaf_modules(model, config.zero.leaf_module)
    members = form_groups(model, config.zero.persistence_threshold, leaves)
    trained = chosen.trained
    layouts = [
        lay_out(
            [(i, name, tuple(p.shape), p in trained) for i, name, p in group.params],
            compute.itemsize,
            world_size,
        )
        for group in members
    ]
    _check_offload(config, on_gpu)
    groups = tuple(
        GroupSizes(
            name=group.name,
            param_bytes=layout.numel * compute.itemsize,
            trainable_numel=layout.trainable_numel,
            parent=group.parent,
            persistent=group.persistent,
            uses=len(group.entries),
        )
        for group, layout in zip(members, layouts, strict=True)
    )
    workload = Workload(
        groups=groups,
        micro_batches=config.gradient_accumulation_steps,
        compute_itemsize=compute.itemsize,
        grad_itemsize=grad_dtype.itemsize,
        state_tensors=chosen.state_tensors,
        offload_param=OFFLOAD_TIERS[config.zero.offload_param.device],
        offload_optimizer=OFFLOAD_TIERS[config.zero.offload_optimizer.device],
        cache_in_host=config.tiering.cache_in_host,
        sub_group_numel=config.zero.sub_group_size,
        prefetch_bytes=config.zero.prefetch_elements * compute.itemsize,
        device_is_host=not on_gpu,
        verified_files=len(nvme_paths(config).all) if config.tiering.verify else 0,
        fetch_by_copy=on_gpu or not can_exchange(),
        offload_ratio=config.zero.offload_optimizer.ratio,
        whole_groups=chosen.rule is None,
        split=chosen.split,
        can_split=compute is torch.bfloat16,
        moment_itemsize=chosen.moments.itemsize,
        step_in_backward=config.tiering.step_in_backward,
        world_size=world_size,
        stage=config.zero.stage,
        reduce_itemsize=reduce_dtype.itemsize,
    )
    return SizedModel(members, layouts, compute, grad_dtype, reduce_dtype, workload)


def nvme_paths(config: TieringConfig) -> NvmePaths:
    """The directories of the swap space that ``config`` names."""
    param, optimizer = (
        tuple(path.resolve() for path in section.nvme_path) if section.device == "nvme" else ()
        for section in (config.zero.offload_param, config.zero.offload_optimizer)
    )
    return NvmePaths(param, optimizer)


def _grad_dtype(config: TieringConfig, compute: torch.dtype, chosen: OptimizerChoice) -> torch.dtype:
    """The dtype gradients accumulate in: the compute dtype for one micro-batch, else fp32, unless configured.

    An optimizer without a kernel takes fp32 gradients: what is fp32 already needs no second copy.
    """
    if config.tiering.grad_accum_dtype != "auto":
        return COMPUTE_DTYPES[config.tiering.grad_accum_dtype]
    one_pass = config.gradient_accumulation_steps == 1 and chosen.rule is not None
    return compute if one_pass else torch.float32


def _reduce_dtype(config: TieringConfig, compute: torch.dtype, grad_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients are sent to other ranks: what they have then, unless configured."""
    if config.tiering.reduce_dtype != "auto":
        return COMPUTE_DTYPES[config.tiering.reduce_dtype]
    return compute if config.zero.stage >= 2 else grad_dtype


def _check_offload(config: TieringConfig, on_gpu: bool) -> None:
    param, optimizer = config.zero.offload_param.device, config.zero.offload_optimizer.device
    if on_gpu and optimizer == "none" != param:
        raise ConfigError(
            "offload_param without offload_optimizer is not supported in this version on a GPU: offload both"
        )
    ratio = config.zero.offload_optimizer.ratio
    if on_gpu and ratio < 1 and param != "none":
        raise ConfigError(
            f"offload_optimizer.ratio {ratio} keeps optimizer state on the GPU, where it steps parameters that stay"
            f" there, but offload_param.device is {param!r}; set ratio to 1, or offload_param.device to 'none'"
        )
