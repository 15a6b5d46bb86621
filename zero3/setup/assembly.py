"""Assembly: from a model and a configuration to groups with storage, a plan, tiers, gradients and an optimizer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from tiering import logs
from tiering.config.training import TieringConfig
from tiering.errors import ConfigError
from tiering.host import topology
from tiering.placement.budgets import least_of, plan_within, resolve_budgets
from tiering.placement.plan import Budgets, Tier
from tiering.storage.arena import round_up
from tiering.weights.files import open_weights
from zero3.building.fill import Fill, Given
from zero3.building.meta import build_on_meta
from zero3.building.model_names import ModelNames
from zero3.building.weights import Matched, match
from zero3.building.zero_init import check_apart
from zero3.device.choice import chosen_device
from zero3.device.streams import Streams, streams_of
from zero3.device.tiers import Home, NvmePaths, Tiers
from zero3.device.timeline import StallClock, Timeline
from zero3.observe.device_rates import settle_update_share
from zero3.observe.monitors import check_monitors
from zero3.optimizer.client import ClientOptimizer
from zero3.optimizer.tiered import TieredOptimizer
from zero3.optimizer.tiles import StateLayout, Tile, make_tiles
from zero3.optimizer.update_rules import OptimizerOptions
from zero3.params.grouping import GroupMembers
from zero3.params.layout import FlatLayout, shard, shard_ranges
from zero3.params.param_group import ParamGroup
from zero3.params.precision import COMPUTE_DTYPES
from zero3.params.replicas import Replicas
from zero3.parts import Assembly
from zero3.passes.gradients import GradientStore
from zero3.passes.reduction import GradientReducer
from zero3.ranks.collectives import Collectives
from zero3.ranks.joining import ALONE, World, join
from zero3.setup.model_size import nvme_paths, size_up
from zero3.setup.optimizer_choice import (
    ClientOptimizerChoice,
    ModelParameters,
    OptimizerChoice,
    choose_optimizer,
)

log = logging.getLogger(__name__)


class Weights(NamedTuple):
    """Files with the first values of a model's parameters; ``strict``: of exactly its parameters."""

    path: Path
    strict: bool


def assemble(
    model: nn.Module,
    config: TieringConfig,
    model_parameters: ModelParameters | None,
    optimizer: ClientOptimizerChoice | None = None,
    weights: Weights | None = None,
) -> Assembly:
    """Plan, make the tiers and move ``model`` onto them. What is refused is refused before anything moves.

    ``optimizer`` is what the user gave in place of the configuration's: an optimizer, or a function of the parameters.
    Parameters that ``weights`` hold take their first values from there.
    """
    device = chosen_device()
    world = join(device, config.tiering.distributed.timeout)
    if device.type == "cuda" and world.local_size > 1:  # a launcher may show each rank its own GPU alone
        torch.cuda.set_device(world.local_rank % torch.cuda.device_count())
        device = torch.device("cuda", torch.cuda.current_device())
    streams = streams_of(device)
    stalls = StallClock(Timeline(), streams)
    given = model, config, model_parameters, optimizer, weights, device, streams, stalls
    if world.size == 1:
        return _assemble(*given, None)
    collectives = Collectives(world, device, config.tiering.distributed, stalls, streams)
    try:
        return _assemble(*given, collectives)
    except BaseException as error:
        collectives.peers.fail(error)
        collectives.close()
        raise


def _assemble(
    model: nn.Module,
    config: TieringConfig,
    model_parameters: ModelParameters | None,
    optimizer: ClientOptimizerChoice | None,
    weights: Weights | None,
    device: torch.device,
    streams: Streams | None,
    stalls: StallClock,
    collectives: Collectives | None,
) -> Assembly:
    world = ALONE if collectives is None else collectives.world
    check_apart(model)
    if world.rank == 0:  # who writes them
        check_monitors(config.monitor)
    loaded = None if weights is None else match(model, open_weights(weights.path), strict=weights.strict)
    chosen = choose_optimizer(model, config, model_parameters, optimizer)
    if collectives is not None:
        _check_ranks_agree(collectives, model, config, chosen, loaded)
    node = topology.settle(
        world.local_rank,
        world.local_size,
        _bus_id(device) if world.local_size > 1 else None,
        gather=None if collectives is None else collectives.of_node,
    )
    sized = size_up(model, config, chosen, on_gpu=streams is not None, world_size=world.size)
    members, layouts, load = sized.members, sized.layouts, sized.workload
    compute, grad_dtype, reduce_dtype = sized.compute, sized.grad_dtype, sized.reduce_dtype
    nvme = nvme_paths(config)
    budgets = _budgets(config, device, nvme, world, collectives)
    if streams is not None and config.tiering.update_on_device == "auto":
        ranks = world.local_size
        load = settle_update_share(load, budgets, device, local_ranks=ranks, collectives=collectives)
    plan = plan_within(
        load, budgets, config.tiering, nvme.all, lambda: _budgets(config, device, nvme, world, collectives)
    )
    if collectives is not None:
        collectives.check_same("plan", (f"{key} {value}" for key, value in vars(load).items()))
    log.log(logs.once(logging.INFO), "%s", plan)
    if sized.kept:
        log.log(logs.once(logging.INFO), "%d parameters stay fp32 (tiering.keep_fp32)", len(sized.kept))

    build_on_meta(model, loaded)
    tiers = Tiers(plan, device, config.tiering, nvme, stalls, node.numa_node)
    untrained = [] if chosen.trains else [param for param in model.parameters() if param.requires_grad]
    try:
        _freeze(untrained)
        groups = _make_groups(members, layouts, compute, tiers, collectives)
        tiles = make_tiles(plan.sub_groups, groups, tiers)
        local = _local_gradients(groups, grad_dtype, tiers) if load.grads_stay_local else None
        gradients = _gradient_store(groups, grad_dtype, tiers, local, world)
        layout = StateLayout.of(load, chosen.moments)
        fill = Fill(tiers, tiles, layout, chosen.initial_state, collectives)
        with nullcontext() if loaded is None else loaded.reading(config.tiering.io):
            if loaded is not None:
                loaded.fill_buffers()
            _move_buffers(model, device, config, sized.kept, collectives)
            fill.run(
                groups, {} if loaded is None else {param: Given(s) for param, s in loaded.sources.items()}
            )
        replicas = None if collectives is None else Replicas(groups, collectives)
        stepper = _stepper(chosen, tiles, layout, gradients, tiers, replicas)
        sink: GradientStore | GradientReducer = gradients
        if collectives is not None:
            sink = GradientReducer(groups, gradients, collectives, tiers, reduce_dtype, local, load.stage)
    except BaseException:
        tiers.close()
        for param in untrained:
            param.requires_grad_(True)
        raise
    return Assembly(
        world=world,
        device=device,
        plan=plan,
        tiers=tiers,
        groups=groups,
        tiles=tiles,
        layout=layout,
        gradients=gradients,
        optimizer=stepper,
        sink=sink,
        collectives=collectives,
        replicas=replicas,
        fill=fill,
        frozen=untrained,
        names=ModelNames(model),
    )


def _freeze(untrained: list[nn.Parameter]) -> None:
    """Without an optimizer nothing would take the gradients."""
    for param in untrained:
        param.requires_grad_(False)
    if untrained:
        logs.progress().log(
            logs.once(logging.INFO), "no optimizer is given: the model is not trained, and is frozen"
        )


def _check_ranks_agree(
    collectives: Collectives,
    model: nn.Module,
    config: TieringConfig,
    chosen: OptimizerChoice,
    loaded: Matched | None,
) -> None:
    """All ranks were asked for the same, and for what several can do."""
    if chosen.rule is None and config.zero.stage > 0:
        raise ConfigError(
            f"the {type(chosen.client).__name__} has no kernel here and steps whole parameters, but stage"
            f" {config.zero.stage} shards optimizer state over the ranks; use stage 0, or AdamW, Adam, Lion, Adagrad"
            " or SGD"
        )
    collectives.check_same("configuration", _settings(config))  # first: a model's groups come of it
    collectives.check_same("model", _described(model, chosen))
    collectives.check_same("weights file", _stored(loaded))


def _described(model: nn.Module, chosen: OptimizerChoice) -> Iterator[str]:
    """A line for each parameter and buffer, and for what the optimizer is told, to be compared between ranks."""
    trained = chosen.trained
    for name, param in model.named_parameters():
        yield f"{name!r} {tuple(param.shape)} {param.dtype}{'' if param in trained else ' frozen'}"
    for name, buffer in model.named_buffers():
        yield f"buffer {name!r} {tuple(buffer.shape)} {buffer.dtype}"
    for number, group in enumerate(chosen.param_groups):
        plain = (bool, int, float, str, tuple, type(None))
        options = {key: value for key, value in group.items() if isinstance(value, plain)}
        yield f"param group {number} of {len(group['params'])} parameters {options}"


def _stored(loaded: Matched | None) -> Iterator[str]:
    """A line for each tensor that is to be loaded, to be compared between ranks."""
    sources = () if loaded is None else loaded.sources.values()
    for tensor in (part for source in sources for part in source.parts):
        yield f"{tensor.name!r} {tensor.shape} {tensor.dtype}"


def _settings(config: TieringConfig) -> Iterator[str]:
    """A line for each setting that has to be the same on all ranks: where a node keeps what is its own business."""
    own = {"tiering": {"io", "telemetry", "run_name", "device_budget", "host_budget", "nvme_budget"}}
    paths: dict[str, Any] = {"zero": {"offload_param": {"nvme_path"}, "offload_optimizer": {"nvme_path"}}}
    said = {"monitor": True, "steps_per_print": True, "wall_clock_breakdown": True}  # by rank 0 alone
    for section, values in config.model_dump(mode="json", exclude=own | paths | said).items():
        if isinstance(values, dict):
            yield from (f"{section}.{key} {value}" for key, value in values.items())
        else:
            yield f"{section} {values}"


def _bus_id(device: torch.device) -> str | None:
    """The PCI bus id of a GPU."""
    if device.type == "cpu":
        return None
    found: Any = torch.cuda.get_device_properties(device)
    if not hasattr(found, "pci_domain_id"):  # torch 2.7
        return None
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def _move_buffers(
    model: nn.Module,
    device: torch.device,
    config: TieringConfig,
    kept: frozenset[nn.Parameter],
    collectives: Collectives | None,
) -> None:
    """All are rank 0's, and keep their dtype unless ``buffer_dtype`` names one.

    Those that a module computes with beside its parameters stay exact so: running statistics, routing biases, rotary
    frequencies. Only where torch has no kernel for both, batch normalisation in 16 bits on a CPU, they follow.
    """
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if collectives is not None:
                    values = buffer.detach().to("cpu", copy=True).contiguous()
                    collectives.broadcast(values.view(-1), 0, f"send the first value of buffer {name!r}")
                    buffer.data = values
                buffer.data = buffer.data.to(device, _buffer_dtype(module, buffer, device, config, kept))


def _buffer_dtype(
    module: nn.Module,
    buffer: Tensor,
    device: torch.device,
    config: TieringConfig,
    kept: frozenset[nn.Parameter],
) -> torch.dtype:
    if not buffer.is_floating_point():
        return buffer.dtype
    if config.buffer_dtype is not None:
        return COMPUTE_DTYPES[config.buffer_dtype]
    if device.type == "cpu" and isinstance(module, _NormBase) and not kept.intersection(module.parameters()):
        return COMPUTE_DTYPES[config.precision]
    return buffer.dtype


def _budgets(
    config: TieringConfig,
    device: torch.device,
    nvme: NvmePaths,
    world: World,
    collectives: Collectives | None,
) -> Budgets:
    """This rank's, which are those of all."""
    free = None
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what an earlier engine has left in torch's pool is free
        free = torch.cuda.mem_get_info(device)[0]
    mine = resolve_budgets(
        config.tiering, device_memory=free, nvme_paths=nvme.all, ranks_on_node=world.local_size
    )
    if collectives is None:
        return mine
    row = torch.tensor([mine.device, mine.host, mine.nvme], dtype=torch.int64, device="cpu")
    told = collectives.table(row, "compare budgets").tolist()
    return least_of(Budgets(device, host, nvme_bytes, mine.sources) for device, host, nvme_bytes in told)


def _stepper(
    chosen: OptimizerChoice,
    tiles: list[Tile],
    layout: StateLayout,
    gradients: GradientStore,
    tiers: Tiers,
    replicas: Replicas | None,
) -> TieredOptimizer | ClientOptimizer:
    client = chosen.client
    if chosen.rule is None:
        assert client is not None
        log.log(
            logs.once(logging.INFO),
            "%s steps by itself, on the device; what it keeps there is not in the plan",
            type(client).__name__,
        )
        return ClientOptimizer(client, tiles, gradients)
    if client is not None:
        client.state.clear()  # Adagrad's sums: they are on the tiers now
    options = OptimizerOptions(chosen.param_groups, chosen.defaults, taken_over=client)
    return TieredOptimizer(chosen.rule, options, tiles, layout, gradients, tiers, replicas)


def _make_groups(
    members: list[GroupMembers],
    layouts: list[FlatLayout],
    compute: torch.dtype,
    tiers: Tiers,
    collectives: Collectives | None,
) -> list[ParamGroup]:
    load = tiers.plan.workload
    places = _places(members, tiers)
    made = []
    for index, (group, layout) in enumerate(zip(members, layouts, strict=True)):
        by_index = {i: param for i, _, param in group.params}
        names = tuple(piece.name for piece in layout.pieces)
        sizes = load.groups[index]
        home = tiers.home(tiers.plan.param_tiers[index], load.home_bytes(sizes), "parameters", names)
        sharded = load.shards_params(sizes)
        dtype = torch.float32 if group.in_fp32 else compute
        shard_layout, shard_home = layout, home
        if collectives is not None and load.stage >= 1:
            world = collectives.world
            shard_layout = shard(layout, world.size, world.rank, trainable_only=not sharded)
            if not sharded:
                mine = shard_ranges(layout, world.size, world.rank)[0]
                assert home.tensor is not None
                shard_home = Home(
                    home.tensor[mine.start * dtype.itemsize : mine.stop * dtype.itemsize],
                    on_device=home.on_device,
                )
        made.append(
            ParamGroup(
                index,
                group.name,
                layout,
                [by_index[piece.index] for piece in layout.pieces],
                group.entries,
                group.parent,
                dtype=dtype,
                home=home,
                tiers=tiers,
                place=places.get(index),
                shard=shard_layout,
                shard_home=shard_home,
                gathers=collectives if sharded else None,
                in_fp32=group.in_fp32,
            )
        )
    return made


def _places(members: list[GroupMembers], tiers: Tiers) -> dict[int, int]:
    """The offsets in the working arena of the groups that enclose others: stacked from its end, outermost first.

    They stay while the groups inside them come and go. Wherever they were put, they could cut the room for those into
    pieces that are too small, although the plan has counted enough of it.
    """

    plan = tiers.plan

    def stacked(index: int | None) -> int:
        if index is None:
            return 0
        sizes = plan.workload.groups[index]
        moves = not plan.workload.computes_in_place(sizes, plan.param_tiers[index])
        nbytes = round_up(sizes.param_bytes) if moves else 0
        return nbytes + stacked(members[index].parent)

    parents = {group.parent for group in members if group.parent is not None}
    return {index: tiers.working.capacity - stacked(index) for index in parents}


def _gradient_store(
    groups: list[ParamGroup],
    dtype: torch.dtype,
    tiers: Tiers,
    local: list[Tensor] | None,
    world: World,
) -> GradientStore:
    """Where gradients are kept until they are used. ``local`` are whole ones, which stage 0 reduces where they are."""
    if local is None or tiers.plan.workload.stage > 0:
        homes = [
            tiers.home(
                tier,
                group.shard.trainable_numel * _accumulated_in(group, dtype).itemsize,
                "gradients",
                tuple(piece.name for piece in group.shard.pieces if piece.trainable),
            )
            for group, tier in zip(groups, tiers.plan.grad_tiers, strict=True)
        ]
        return GradientStore(groups, homes, dtype, tiers)
    homes = [Home(flat.view(torch.uint8), on_device=not tiers.device_is_host) for flat in local]
    # Each rank tells the squares of its share, so that the norm has the bits that it has in every other stage.
    shares = {group: shard_ranges(group.layout, world.size, world.rank)[0] for group in groups}
    return GradientStore(groups, homes, dtype, tiers, measured=shares)


def _local_gradients(groups: list[ParamGroup], dtype: torch.dtype, tiers: Tiers) -> list[Tensor]:
    """Whole gradients of each group, on the device."""
    flats = []
    for group in groups:
        names = tuple(piece.name for piece in group.layout.pieces if piece.trainable)
        kept = _accumulated_in(group, dtype)
        nbytes = group.layout.trainable_numel * kept.itemsize
        home = tiers.home(Tier.DEVICE, nbytes, "local gradients", names)
        assert home.tensor is not None
        flats.append(home.tensor.view(kept))
    return flats


def _accumulated_in(group: ParamGroup, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if group.in_fp32 else dtype
