"""Assembly: from a model and a configuration to groups with storage, a plan, tiers, gradients and an optimizer."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tiering import _logs
from tiering.checkpoint.directory import CheckpointDirectory
from tiering.config.training import TieringConfig, format_size
from tiering.errors import ConfigError, PlacementError
from tiering.host import topology
from tiering.host.numa import Node
from tiering.placement.budgets import fits, least_of, plan_within, resolve_budgets
from tiering.placement.plan import Budgets, Plan
from tiering.weights.files import open_weights
from zero3.building.fill import Fill
from zero3.building.first_values import FirstValues
from zero3.building.meta import build_on_meta
from zero3.building.model_names import ModelNames
from zero3.building.peft_models import added_names
from zero3.building.quantization import check_adapters, noting_quantised, quantize_as_configured
from zero3.building.tiling import Tiles, tile_as_configured, with_tiles
from zero3.building.weights import Matched, match
from zero3.building.wrapped_parameters import WrappedParameters
from zero3.building.zero_init import check_apart
from zero3.device.choice import chosen_device
from zero3.device.home import NvmePaths
from zero3.device.streams import streams_of
from zero3.device.tiers import Tiers
from zero3.device.timeline import StallClock, Timeline
from zero3.observe.device_rates import settle_update_share
from zero3.observe.disk_rate import settle_disk_rate
from zero3.observe.monitors import check_monitors
from zero3.observe.step_choice import settle_step
from zero3.optimizer.client import ClientOptimizer
from zero3.optimizer.tiered import TieredOptimizer
from zero3.optimizer.tile_stepper import TileStepper
from zero3.optimizer.tiles import StateLayout, Tile, make_tiles
from zero3.optimizer.update_rules import OptimizerOptions
from zero3.params.param_group import ParamGroup
from zero3.params.replicas import Replicas
from zero3.parts import Assembly
from zero3.passes.gradients import GradientStore
from zero3.passes.reduction import GradientReducer
from zero3.ranks.agreement import together
from zero3.ranks.collectives import Collectives
from zero3.ranks.joining import World, join
from zero3.ranks.mesh import MeshPlace
from zero3.setup.buffers import move_buffers
from zero3.setup.gradient_homes import make_gradient_store, make_local_gradients
from zero3.setup.groups import make_groups, slice_experts
from zero3.setup.in_place import Cuts, InPlace, find_in_place
from zero3.setup.model_size import SizedModel, nvme_paths, size_up, sizes_of_cuts
from zero3.setup.optimizer_choice import (
    ClientOptimizerChoice,
    ModelParameters,
    OptimizerChoice,
    choose_optimizer,
)
from zero3.setup.rank_comparison import check_ranks_agree
from zero3.setup.tile_advice import advise_tiles, tiling_of

log = logging.getLogger(__name__)


class Weights(NamedTuple):
    """Files with the first values of a model's parameters; ``strict``: of exactly its parameters."""

    path: Path
    strict: bool


@dataclass(frozen=True)
class _Request:
    """The arguments of ``assemble``."""

    model: nn.Module
    config: TieringConfig
    model_parameters: ModelParameters | None
    optimizer: ClientOptimizerChoice | None
    weights: Weights | None
    resume: Path | None


@dataclass(frozen=True)
class _Rank:
    """The device of this rank, the clock of its stalls with the streams of a GPU, and the other ranks."""

    world: World
    device: torch.device
    stalls: StallClock
    collectives: Collectives | None


@dataclass(frozen=True)
class _Checked:
    """The optimizer that was chosen, the stored tensors that were found for the model, and whether it resumes."""

    chosen: OptimizerChoice
    loaded: Matched | None
    resumes: bool


@dataclass(frozen=True)
class _Planned:
    """The model cut into groups, the directories of the swap space, and the plan for both.

    Of the groups that are ``in_place``, the plan decides which are read in memory all the same.
    """

    sized: SizedModel
    nvme: NvmePaths
    plan: Plan
    in_place: InPlace


def assemble(
    model: nn.Module,
    config: TieringConfig,
    model_parameters: ModelParameters | None,
    optimizer: ClientOptimizerChoice | None = None,
    weights: Weights | None = None,
    resume: Path | None = None,
    place: MeshPlace | None = None,
) -> Assembly:
    """Plan, make the tiers and move ``model`` onto them. Errors in the arguments are raised before anything moves.

    ``optimizer`` replaces the configuration's: an optimizer, or a function of the parameters that makes one.
    Parameters that are in ``weights`` take their first values from there. If ``resume`` has a checkpoint, which is
    loaded next, what a snapshot would have in swap space takes none. ``place`` is that of this rank in a mesh.
    """
    request = _Request(model, config, model_parameters, optimizer, weights, resume)
    device = chosen_device()
    world = join(device, config.tiering.distributed.timeout, place)
    if device.type == "cuda" and world.local_size > 1:
        # Modulo, because a launcher may show each rank only its own GPU.
        torch.cuda.set_device(world.local_rank % torch.cuda.device_count())
        device = torch.device("cuda", torch.cuda.current_device())
    stalls = StallClock(Timeline(), streams_of(device))
    if world.size == 1:
        return _assemble(request, _Rank(world, device, stalls, collectives=None))
    collectives = Collectives(world, device, config.tiering.distributed, stalls, stalls.streams)
    try:
        return _assemble(request, _Rank(world, device, stalls, collectives))
    except BaseException as error:
        collectives.peers.fail(error)
        collectives.close()
        raise


def _assemble(request: _Request, rank: _Rank) -> Assembly:
    wrapped = WrappedParameters.split(request.model, rank.device)
    try:
        with noting_quantised(request.model):
            return _assemble_split(request, rank, wrapped)
    except BaseException:
        wrapped.undo()
        raise


def _assemble_split(request: _Request, rank: _Rank, wrapped: WrappedParameters) -> Assembly:
    model, config = request.model, request.config
    checked = _check(request, rank)
    nodes = _settle_on_node(rank, nvme=bool(nvme_paths(config).all))
    planned = _plan(model, config, checked, rank)
    build_on_meta(model, checked.loaded)
    versions = planned.in_place.versions
    tiers = Tiers(planned.plan, rank.device, config.tiering, planned.nvme, rank.stalls, nodes, versions)
    # Without an optimizer nothing would use gradients.
    frozen = [] if checked.chosen.trains else [param for param in model.parameters() if param.requires_grad]
    try:
        _freeze(frozen)
        return _place(request, rank, checked, planned, tiers, frozen, wrapped)
    except BaseException:
        tiers.close()
        for param in frozen:
            param.requires_grad_(True)
        raise


def _check(request: _Request, rank: _Rank) -> _Checked:
    """Match the weights and choose the optimizer. Raises for whatever cannot be trained, and where ranks differ."""
    model, config, weights = request.model, request.config, request.weights
    check_apart(model)
    # Rank 0 writes to the monitors.
    if rank.world.rank == 0:
        check_monitors(config.monitor)
    quantize_as_configured(model, config)
    request = _with_tiles(request, tile_as_configured(model, config))
    check_adapters(model)
    loaded = None
    if weights is not None:
        adapters = frozenset(added_names(model))
        loaded = match(
            model, open_weights(weights.path), strict=weights.strict, excluded=adapters, encode=True
        )
    chosen = choose_optimizer(model, config, request.model_parameters, request.optimizer)
    if rank.collectives is not None:
        check_ranks_agree(rank.collectives, model, config, chosen, loaded)

    def has_checkpoint() -> bool:
        return request.resume is not None and CheckpointDirectory(request.resume).find() is not None

    resumes = together(rank.collectives, "find the checkpoint to resume from", has_checkpoint)[0]
    return _Checked(chosen, loaded, resumes)


def _with_tiles(request: _Request, tiles: Tiles) -> _Request:
    """``request`` for a model in which ``tiles`` have replaced weights; an optimizer that was made gets them, too."""
    if not tiles:
        return request
    if isinstance(request.optimizer, torch.optim.Optimizer):
        if any(weight in request.optimizer.state for weight in tiles):
            raise ConfigError(
                "tiering.tile cuts weights for which the optimizer has state already: pass a new optimizer, or call"
                " tiering.tile(model, SIZE) before the optimizer is made"
            )
        groups = request.optimizer.param_groups
        groups[:] = with_tiles(groups, tiles)
    if request.model_parameters is None:
        return request
    return replace(request, model_parameters=with_tiles(request.model_parameters, tiles))


def _settle_on_node(rank: _Rank, *, nvme: bool) -> tuple[Node, ...]:
    """Take this rank's part of the machine's CPUs; returns the NUMA nodes of its memory."""
    world, collectives = rank.world, rank.collectives
    part = topology.settle(
        world.local_rank,
        world.local_size,
        _pci_bus_id(rank.device) if world.local_size > 1 else None,
        nvme=nvme,
        gather=None if collectives is None else collectives.gather_on_node,
    )
    return part.nodes


def _plan(model: nn.Module, config: TieringConfig, checked: _Checked, rank: _Rank) -> _Planned:
    """Size the model, measure the budgets of this machine, and place the model within them."""
    on_gpu, nvme = rank.stalls.streams is not None, nvme_paths(config)

    def cut(largest: int | None) -> tuple[SizedModel, InPlace]:
        sized = size_up(
            model,
            config,
            checked.chosen,
            on_gpu=on_gpu,
            world_size=rank.world.partition_size,
            largest=largest,
        )
        return sized, find_in_place(sized, checked.loaded, config, rank.world, rank.collectives)

    budgets = _budgets(config, nvme, rank)
    first, *finer = sizes_of_cuts(model, config, rank.world.partition_size)
    cuts = Cuts([cut(first)])
    if not fits(cuts.load, budgets):
        cuts = Cuts([*cuts.models, *map(cut, finer)])
    load = settle_disk_rate(
        cuts.load, config, local_ranks=rank.world.local_size, collectives=rank.collectives
    )
    if on_gpu and config.tiering.update_on_device == "auto":
        ranks = rank.world.local_size
        load = settle_update_share(
            load, budgets, rank.device, local_ranks=ranks, collectives=rank.collectives
        )
    try:
        plan = plan_within(
            load, budgets, config.tiering, nvme.all, lambda: _budgets(config, nvme, rank, again=True)
        )
    except PlacementError as refusal:
        tiling = tiling_of(model, config, checked.chosen, on_gpu=on_gpu, world_size=rank.world.partition_size)
        raise advise_tiles(refusal, load, tiling, budgets) from None
    sized, in_place = cuts.of(plan)
    plan = settle_step(
        plan, config, rank.device, local_ranks=rank.world.local_size, collectives=rank.collectives
    )
    if rank.collectives is not None:
        values = ((field.name, getattr(plan.workload, field.name)) for field in fields(plan.workload))
        rank.collectives.tables.check_same("plan", (f"{name} {value}" for name, value in values))
    log.log(_logs.once(logging.INFO), "%s", plan)
    if sized.kept_in_fp32:
        log.log(
            _logs.once(logging.INFO), "%d parameters stay fp32 (tiering.keep_fp32)", len(sized.kept_in_fp32)
        )
    if sized.own_dtypes:
        sizes = ", ".join(f"{format_size(nbytes)} of {dtype}" for dtype, nbytes in sized.own_dtypes.items())
        log.log(_logs.once(logging.INFO), "frozen parameters that keep their dtype: %s", sizes)
    in_place.report(plan)
    return _Planned(sized, nvme, plan, in_place)


def _place(
    request: _Request,
    rank: _Rank,
    checked: _Checked,
    planned: _Planned,
    tiers: Tiers,
    frozen: list[nn.Parameter],
    wrapped: WrappedParameters,
) -> Assembly:
    """Make groups, gradients and optimizer on ``tiers``, and move the model's values there."""
    sized, plan = planned.sized, planned.plan
    # A rank that divides its state with no other one has all of it, as one that trains alone.
    sharing = rank.collectives if rank.world.partition_size > 1 else None
    groups = make_groups(sized, tiers, sharing, planned.in_place)
    slice_experts(groups, tiers)
    tiles = make_tiles(plan.sub_groups, groups, tiers)
    stay_local = plan.workload.grads_stay_local
    local = make_local_gradients(groups, sized.grad_dtype, tiers) if stay_local else None
    gradients = make_gradient_store(groups, sized.grad_dtype, tiers, local, rank.world)
    layout = StateLayout.of(plan.workload, checked.chosen.moments)
    fill = Fill(tiers, tiles, layout, checked.chosen.initial_state, sharing)
    _fill(fill, groups, request, rank, checked, planned)
    replicas = None if sharing is None else Replicas(groups, sharing)
    optimizer = _make_optimizer(checked.chosen, tiles, layout, gradients, tiers, replicas)
    sink: GradientStore | GradientReducer = gradients
    if sharing is not None:
        stage, bucket = plan.workload.stage, plan.reduction.bucket
        sink = GradientReducer(groups, gradients, sharing, tiers, sized.reduce_dtype, local, stage, bucket)
    return Assembly(
        world=rank.world,
        device=rank.device,
        plan=plan,
        tiers=tiers,
        groups=groups,
        tiles=tiles,
        layout=layout,
        gradients=gradients,
        optimizer=optimizer,
        sink=sink,
        collectives=rank.collectives,
        replicas=replicas,
        fill=fill,
        resumes=checked.resumes,
        frozen=frozen,
        wrapped=wrapped,
        names=ModelNames(request.model),
    )


def _fill(
    fill: Fill,
    groups: list[ParamGroup],
    request: _Request,
    rank: _Rank,
    checked: _Checked,
    planned: _Planned,
) -> None:
    """Give buffers and groups their first values, from the files if there are any."""
    model, config, loaded = request.model, request.config, checked.loaded
    in_files = planned.in_place.parameters(planned.sized, planned.plan)
    stored = {} if loaded is None else loaded.sources
    stored = {param: source for param, source in stored.items() if param not in in_files}
    with nullcontext() if loaded is None else loaded.reading(config.tiering.io, stored):
        if loaded is not None:
            loaded.fill_buffers()
        move_buffers(model, rank.device, config, planned.sized.kept_in_fp32, rank.collectives)
        sources = {param: FirstValues(source) for param, source in stored.items()}
        fill.run(groups, sources, resumes=checked.resumes)


def _make_optimizer(
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
            _logs.once(logging.INFO),
            "%s steps on the device by itself; the plan does not count the state that it keeps there",
            type(client).__name__,
        )
        return ClientOptimizer(client, tiles, gradients)
    if client is not None:
        # Adagrad makes its sums when it is constructed; the tiers hold them now.
        client.state.clear()
    options = OptimizerOptions(chosen.param_groups, chosen.defaults, source=client)
    stepper = TileStepper(tiles, layout, gradients, tiers, replicas)
    return TieredOptimizer(chosen.rule, options, stepper, gradients)


def _freeze(params: list[nn.Parameter]) -> None:
    for param in params:
        param.requires_grad_(False)
    if params:
        _logs.progress().log(_logs.once(logging.INFO), "no optimizer: the parameters of the model are frozen")


def _pci_bus_id(device: torch.device) -> str | None:
    """The PCI bus id of a GPU; None for a CPU, and where torch does not report it (torch 2.7)."""
    if device.type == "cpu":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    if not hasattr(properties, "pci_domain_id"):
        return None
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def _budgets(config: TieringConfig, nvme: NvmePaths, rank: _Rank, *, again: bool = False) -> Budgets:
    """The budgets of every rank: the smallest on each tier. ``again``: of the ranks of this one's partition only."""
    free, world = None, rank.world
    if rank.device.type == "cuda":
        # Memory that an earlier engine has left in torch's pool is free.
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(rank.device)[0]
    local = resolve_budgets(
        config.tiering, device_memory=free, nvme_paths=nvme.all, ranks_on_node=world.local_size
    )
    if rank.collectives is None:
        return local
    row = torch.tensor([local.device, local.host, local.nvme], dtype=torch.int64, device="cpu")
    # Other partitions may have found room at once.
    tables = rank.collectives.tables if again else rank.collectives.run_tables
    rows = tables.table(row, "compare budgets").tolist()
    return least_of(Budgets(device, host, nvme_bytes, local.sources) for device, host, nvme_bytes in rows)
