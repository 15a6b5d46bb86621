"""Assembly: from a model and a configuration to groups with storage, a plan, tiers, gradients and an optimizer."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch
from torch import nn

from tiering.arena import round_up
from tiering.budgets import resolve_budgets
from tiering.config import TieringConfig
from tiering.errors import ConfigError
from tiering.placement import make_plan
from tiering.plan import GroupSizes, Plan, Tier, Workload
from zero3.client_optimizer import ClientOptimizer
from zero3.flat_storage import Streams, can_exchange
from zero3.grads import GradientStore
from zero3.groups import GroupMembers, form_groups
from zero3.init import fill
from zero3.optimizer import TieredOptimizer
from zero3.optimizer_choice import (
    ClientOptimizerChoice,
    ModelParameters,
    OptimizerChoice,
    choose_optimizer,
)
from zero3.param_group import ParamGroup
from zero3.partition import FlatLayout, lay_out
from zero3.precision import COMPUTE_DTYPES
from zero3.tiers import Home, NvmePaths, Tiers
from zero3.tiles import StateLayout, Tile, make_tiles

log = logging.getLogger(__name__)

OFFLOAD_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}


@dataclass(frozen=True)
class Assembly:
    """The parts of one rank's engine. ``tiers`` owns what has to be closed."""

    device: torch.device
    plan: Plan
    tiers: Tiers
    groups: list[ParamGroup]
    tiles: list[Tile]
    layout: StateLayout
    gradients: GradientStore
    optimizer: TieredOptimizer | ClientOptimizer


def assemble(
    model: nn.Module,
    config: TieringConfig,
    model_parameters: ModelParameters | None,
    optimizer: ClientOptimizerChoice | None = None,
) -> Assembly:
    """Plan, make the tiers and move ``model`` onto them. What is refused is refused before anything moves.

    ``optimizer`` is what the user gave in place of the configuration's: an optimizer, or a function of the parameters.
    """
    device = _device()
    compute = COMPUTE_DTYPES[config.precision]
    chosen = choose_optimizer(model, config, model_parameters, optimizer)
    grad_dtype = _grad_dtype(config, compute, chosen)
    members, layouts = _grouped(model, config, compute, chosen)
    nvme = _nvme_paths(config)
    plan = _plan(config, members, layouts, compute, grad_dtype, chosen, device, nvme)
    log.info("%s", plan)

    tiers = Tiers(plan, device, config.tiering, nvme)
    try:
        streams = None if tiers.device_is_host else Streams()
        groups = _make_groups(members, layouts, compute, tiers, streams)
        tiles = make_tiles(plan.sub_groups, groups, tiers)
        gradients = GradientStore(
            groups, _gradient_homes(groups, grad_dtype, tiers), grad_dtype, tiers, streams
        )
        _move_buffers(model, device, compute)
        layout = StateLayout.of(plan.workload, chosen.moments)
        fill(model, groups, tiles, tiers, layout, chosen.initial_state)
        stepper = _stepper(chosen, tiles, gradients, tiers, streams, layout)
    except BaseException:
        tiers.close()
        raise
    return Assembly(device, plan, tiers, groups, tiles, layout, gradients, stepper)


def _move_buffers(model: nn.Module, device: torch.device, compute: torch.dtype) -> None:
    """Those of the state_dict take the compute dtype, as if a 16-bit checkpoint had been loaded.

    What is computed when the model is built keeps its own: rotary frequencies in 16 bits are useless.
    """
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                cast = buffer.is_floating_point() and name not in module._non_persistent_buffers_set
                buffer.data = buffer.data.to(device, compute if cast else buffer.dtype)


def _device() -> torch.device:
    """The GPU if there is one, else the CPU; TIERING_DEVICE=cpu insists."""
    wanted = os.environ.get("TIERING_DEVICE", "")
    if wanted not in ("", "cpu", "cuda"):
        raise ConfigError(f"TIERING_DEVICE is {wanted!r}; use 'cpu' or 'cuda'")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "TIERING_DEVICE is 'cuda' but torch finds no GPU; install a CUDA build, or use 'cpu'"
        )
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _grad_dtype(config: TieringConfig, compute: torch.dtype, chosen: OptimizerChoice) -> torch.dtype:
    """The dtype gradients accumulate in: the compute dtype for one micro-batch, else fp32, unless configured.

    An optimizer without a kernel takes fp32 gradients: what is fp32 already needs no second copy.
    """
    if config.tiering.grad_accum_dtype != "auto":
        return COMPUTE_DTYPES[config.tiering.grad_accum_dtype]
    one_pass = config.gradient_accumulation_steps == 1 and chosen.rule is not None
    return compute if one_pass else torch.float32


def _nvme_paths(config: TieringConfig) -> NvmePaths:
    param, optimizer = (
        tuple(path.resolve() for path in section.nvme_path) if section.device == "nvme" else ()
        for section in (config.zero.offload_param, config.zero.offload_optimizer)
    )
    return NvmePaths(param, optimizer)


def _grouped(
    model: nn.Module, config: TieringConfig, compute: torch.dtype, chosen: OptimizerChoice
) -> tuple[list[GroupMembers], list[FlatLayout]]:
    trainable = chosen.trained
    members = form_groups(model, config.zero.persistence_threshold)
    layouts = [
        lay_out([(i, name, tuple(p.shape), p in trainable) for i, name, p in group.params], compute.itemsize)
        for group in members
    ]
    return members, layouts


def _plan(
    config: TieringConfig,
    members: list[GroupMembers],
    layouts: list[FlatLayout],
    compute: torch.dtype,
    grad_dtype: torch.dtype,
    chosen: OptimizerChoice,
    device: torch.device,
    nvme: NvmePaths,
) -> Plan:
    on_gpu = device.type == "cuda"
    if on_gpu and config.zero.offload_optimizer.device == "none" != config.zero.offload_param.device:
        raise ConfigError(
            "offload_param without offload_optimizer is not supported in this version on a GPU: offload both"
        )
    ratio = config.zero.offload_optimizer.ratio
    if on_gpu and ratio < 1 and config.zero.offload_param.device != "none":
        raise ConfigError(
            f"offload_optimizer.ratio {ratio} keeps optimizer state on the GPU, where it steps parameters that stay"
            f" there, but offload_param.device is {config.zero.offload_param.device!r}; set ratio to 1, or"
            " offload_param.device to 'none'"
        )
    load = Workload(
        groups=tuple(
            GroupSizes(
                name=group.name,
                param_bytes=layout.numel * compute.itemsize,
                trainable_numel=layout.trainable_numel,
                parent=group.parent,
                persistent=group.persistent,
                uses=len(group.entries),
            )
            for group, layout in zip(members, layouts, strict=True)
        ),
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
        verified_files=len(nvme.all) if config.tiering.verify else 0,
        fetch_by_copy=on_gpu or not can_exchange(),
        offload_ratio=ratio,
        whole_groups=chosen.rule is None,
        split=chosen.split,
        can_split=compute is torch.bfloat16,
        moment_itemsize=chosen.moments.itemsize,
        step_in_backward=config.tiering.step_in_backward,
    )
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else None
    return make_plan(load, resolve_budgets(config.tiering, device_memory=free, nvme_paths=nvme.all))


def _stepper(
    chosen: OptimizerChoice,
    tiles: list[Tile],
    gradients: GradientStore,
    tiers: Tiers,
    streams: Streams | None,
    layout: StateLayout,
) -> TieredOptimizer | ClientOptimizer:
    client = chosen.client
    if chosen.rule is None:
        assert client is not None
        log.info(
            "%s steps by itself, on the device; what it keeps there is not in the plan", type(client).__name__
        )
        return ClientOptimizer(client, tiles, gradients)
    if client is not None:
        client.state.clear()  # Adagrad's sums: they are on the tiers now
    return TieredOptimizer(
        chosen.param_groups,
        chosen.defaults,
        chosen.rule,
        tiles,
        gradients,
        tiers,
        streams,
        layout,
        taken_over=client,
    )


def _make_groups(
    members: list[GroupMembers],
    layouts: list[FlatLayout],
    compute: torch.dtype,
    tiers: Tiers,
    streams: Streams | None,
) -> list[ParamGroup]:
    places = _places(members, layouts, compute, tiers)
    made = []
    for index, (group, layout) in enumerate(zip(members, layouts, strict=True)):
        by_index = {i: param for i, _, param in group.params}
        names = tuple(piece.name for piece in layout.pieces)
        home = tiers.home(tiers.plan.param_tiers[index], layout.numel * compute.itemsize, "parameters", names)
        made.append(
            ParamGroup(
                index,
                group.name,
                layout,
                [by_index[piece.index] for piece in layout.pieces],
                group.entries,
                group.parent,
                dtype=compute,
                home=home,
                tiers=tiers,
                streams=streams,
                place=places.get(index),
            )
        )
    return made


def _places(
    members: list[GroupMembers], layouts: list[FlatLayout], compute: torch.dtype, tiers: Tiers
) -> dict[int, int]:
    """The offsets in the working arena of the groups that enclose others: stacked from its end, outermost first.

    They stay while the groups inside them come and go. Wherever they were put, they could cut the room for those into
    pieces that are too small, although the plan has counted enough of it.
    """

    plan = tiers.plan

    def stacked(index: int | None) -> int:
        if index is None:
            return 0
        moves = plan.param_tiers[index] not in plan.workload.computed_in_place
        nbytes = round_up(layouts[index].numel * compute.itemsize) if moves else 0
        return nbytes + stacked(members[index].parent)

    parents = {group.parent for group in members if group.parent is not None}
    return {index: tiers.working.capacity - stacked(index) for index in parents}


def _gradient_homes(groups: list[ParamGroup], dtype: torch.dtype, tiers: Tiers) -> list[Home]:
    return [
        tiers.home(
            tier,
            group.layout.trainable_numel * dtype.itemsize,
            "gradients",
            tuple(piece.name for piece in group.layout.pieces if piece.trainable),
        )
        for group, tier in zip(groups, tiers.plan.grad_tiers, strict=True)
    ]
