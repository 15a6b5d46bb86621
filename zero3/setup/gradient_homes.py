"""Makes the memory in which gradients accumulate: their homes on the tiers, and whole gradients on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from tiering.placement.tenants import GRADIENTS
from tiering.placement.workload import Tier
from zero3.device.home import Home
from zero3.device.tiers import Tiers
from zero3.params.layout import shard_ranges
from zero3.params.param_group import ParamGroup
from zero3.passes.gradients import GradientStore
from zero3.ranks.joining import World


def make_gradient_store(
    groups: list[ParamGroup],
    dtype: torch.dtype,
    tiers: Tiers,
    local: list[Tensor] | None,
    world: World,
) -> GradientStore:
    """The store of accumulated gradients, in ``dtype``. Stage 0 reduces whole gradients in place, in ``local``."""
    if local is None or tiers.plan.workload.stage > 0:
        homes = [
            tiers.home(
                tier,
                group.shard.trainable_numel * _accumulation_dtype(group, dtype).itemsize,
                GRADIENTS,
                tuple(piece.name for piece in group.shard.pieces if piece.trainable),
            )
            for group, tier in zip(groups, tiers.plan.grad_tiers, strict=True)
        ]
        return GradientStore(groups, homes, dtype, tiers)
    homes = [Home(flat.view(torch.uint8), on_device=not tiers.device_is_host) for flat in local]
    # Each rank adds up the squares of its shard, so that the norm has the same bits in every stage.
    shards = {
        group: shard_ranges(group.layout, world.partition_size, world.partition_rank)[0] for group in groups
    }
    return GradientStore(groups, homes, dtype, tiers, measured=shards)


def make_local_gradients(groups: list[ParamGroup], dtype: torch.dtype, tiers: Tiers) -> list[Tensor]:
    """A flat tensor on the device for the whole gradients of each group."""
    flats = []
    for group in groups:
        names = tuple(piece.name for piece in group.layout.pieces if piece.trainable)
        group_dtype = _accumulation_dtype(group, dtype)
        nbytes = group.layout.trainable_numel * group_dtype.itemsize
        home = tiers.home(Tier.DEVICE, nbytes, "local gradients", names)
        assert home.tensor is not None
        flats.append(home.tensor.view(group_dtype))
    return flats


def _accumulation_dtype(group: ParamGroup, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if group.in_fp32 else dtype
