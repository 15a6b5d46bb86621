"""The parts of an engine's training loop, and their connections."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from torch import nn

from tiering.config.training import TieringConfig
from tiering.placement.workload import ACTIVATIONS, Tier
from tiering.telemetry import ConfigurationStatus
from zero3.checkpoint.checkpoints import Checkpoints
from zero3.checkpoint.export import Export
from zero3.checkpoint.run_state import Resumable
from zero3.checkpoint.snapshots import Snapshots
from zero3.device.tiers import Tiers
from zero3.engine.accumulated_gradients import AccumulatedGradients
from zero3.engine.by_name import NamedState
from zero3.loop.backward_events import BackwardEvents
from zero3.loop.lifecycle import Readiness
from zero3.loop.preemption import Preemption
from zero3.loop.step import Update
from zero3.loop.step_state import Accumulation
from zero3.observe.ending import error_under_way
from zero3.observe.observation import Observation
from zero3.params.param_group import ParamGroup
from zero3.parts import Assembly
from zero3.passes import hooks
from zero3.passes.hooks import Removable
from zero3.passes.kept_activations import KeptActivations, room_on
from zero3.passes.moved_activations import IN_FLIGHT_SHARE, MovedActivations
from zero3.passes.prefetch import Prefetcher, Room
from zero3.passes.row_chunks import RowChunks
from zero3.passes.schedule import PassSchedule
from zero3.state.access import Access
from zero3.state.parameters import Parameters
from zero3.state.tensors import TieredState


@dataclass(frozen=True)
class LoopParts:
    """The parts that train with the parts of one rank (zero3/parts.py). ``end`` closes both."""

    of_rank: Assembly
    updates: Update
    accumulation: Accumulation
    checkpoints: Checkpoints
    snapshots: Snapshots
    export: Export
    state: TieredState
    parameters: Parameters
    prefetcher: Prefetcher
    schedule: PassSchedule
    hooks: list[Removable]
    ready: Readiness
    access: Access
    named_state: NamedState
    preemption: Preemption
    observation: Observation

    def leave(self, error: BaseException | None) -> None:
        """The block of the engine (``with engine:``) has ended, by ``error`` if there is one; ``end`` follows."""
        if not self.ready.closed:
            self.observation.settle(error, stopped_by=self.preemption.requested)
        if error is None:
            return
        # So that end() does not warn of them in addition to the error.
        self.ready.drop_gradients()
        ends_well = isinstance(error, SystemExit) and not error.code
        if not ends_well and self.of_rank.collectives is not None and not self.ready.closed:
            self.of_rank.collectives.peers.fail(error)

    def end(self, call: str) -> None:
        """``call`` ends the engine: record how the run ends, wait for transfers, release memory and swap space.

        Each part is closed, also after an error in another one; the error is raised.
        """
        collectives = self.of_rank.collectives
        self.ready.warn_of_unused_gradients(call)
        self.ready.end(call)
        self.observation.settle(error_under_way(), stopped_by=self.preemption.requested)
        if collectives is not None:
            collectives.settle()
        self.preemption.close()
        self.observation.close()
        for handle in self.hooks:
            handle.remove()
        with ExitStack() as closing:
            closing.callback(self.observation.monitor.close)
            if collectives is not None:
                closing.callback(collectives.close)
            closing.callback(self.of_rank.tiers.close)
            closing.callback(self.access.close)
            closing.callback(self.schedule.close)
            closing.callback(self.snapshots.close)
            self.checkpoints.close()


def connect(
    run: Resumable,
    model: nn.Module,
    config: TieringConfig,
    parts: Assembly,
    configuration: ConfigurationStatus | None,
) -> LoopParts:
    """Make the parts that train ``model`` with ``parts``, from the update up to the files and the telemetry.

    ``run`` is the engine: a checkpoint has its scheduler and its data loader, which it gets later.
    """
    updates = _make_update(config, parts)
    accumulation = Accumulation(config.gradient_accumulation_steps)
    checkpoints = Checkpoints(run, model, config, parts, updates, accumulation)
    state = TieredState(parts, before_write=lambda frozen: checkpoints.before_write(frozen=frozen))
    parameters = Parameters(
        model, parts.groups, state, parts.tiers.check_files, trains=parts.optimizer.trains
    )
    prefetcher = _make_prefetcher(parts, updates)
    events = BackwardEvents(accumulation, updates, parameters, prefetcher)
    schedule, moved = _make_schedule(model, config, parts, prefetcher, events)
    handles = [*hooks.install(model, parts.groups, schedule), *_row_chunks(model, config, parts, schedule)]
    ready = Readiness(
        parameters, parts.tiers, parts.collectives, parts.optimizer, updates, accumulation, schedule
    )
    parts.optimizer.serve(updates, accumulation, ready)
    gradients = AccumulatedGradients(state, schedule, ready, updates, parts.optimizer, config.zero.stage)
    partitioned = config.zero.stage == 3
    access = Access(model, parameters, schedule, prefetcher, state, gradients.assign, partitioned=partitioned)
    observation = Observation(
        model,
        config,
        parts,
        updates=updates,
        activations=schedule.activations,
        moved=moved,
        checkpoint_status=checkpoints.status,
        configuration=configuration,
    )
    return LoopParts(
        of_rank=parts,
        updates=updates,
        accumulation=accumulation,
        checkpoints=checkpoints,
        snapshots=Snapshots(checkpoints, parts, config.tiering.io),
        export=Export(model, config, state),
        state=state,
        parameters=parameters,
        prefetcher=prefetcher,
        schedule=schedule,
        hooks=handles,
        ready=ready,
        access=access,
        named_state=NamedState(access, state, gradients, ready),
        preemption=Preemption(updates, alone=parts.collectives is None),
        observation=observation,
    )


def _make_prefetcher(parts: Assembly, updates: Update) -> Prefetcher:
    gathers = parts.collectives if any(group.sharded for group in parts.groups) else None
    agree = None if gathers is None else gathers.agree
    # Groups may have been fetched ahead already; their bytes are checked here before they are used.
    check_files = [parts.tiers.check_files] if parts.plan.in_place_bytes else []
    before_pass = [*check_files, updates.start_interrupted]
    return Prefetcher(agree, _room_for_expert(parts), before_pass, updates.before_read)


def _make_schedule(
    model: nn.Module, config: TieringConfig, parts: Assembly, prefetcher: Prefetcher, events: BackwardEvents
) -> tuple[PassSchedule, MovedActivations | None]:
    # Slices of experts come behind the groups, as their indices do.
    groups = [*parts.groups, *(each for group in parts.groups for each in group.slices)]
    moved = _moved_activations(model, config, parts.tiers, groups)
    return PassSchedule(groups, prefetcher, parts.sink, events, parts.tiers.timeline, moved), moved


def _moved_activations(
    model: nn.Module, config: TieringConfig, tiers: Tiers, groups: list[ParamGroup]
) -> MovedActivations | None:
    """What moves activations off the device; None if they stay there."""
    place = config.tiering.activations
    if place == "device":
        return None
    memory = tiers.arena_for(ACTIVATIONS, tiers.plan.contents(Tier.HOST)[ACTIVATIONS])
    on_nvme = Tier.NVME in tiers.plan.tiers[ACTIVATIONS]
    kept = KeptActivations(room_on(tiers, memory.capacity // IN_FLIGHT_SHARE)) if place == "auto" else None
    return MovedActivations(tiers, memory, model, groups, on_nvme=on_nvme, kept=kept)


def _row_chunks(
    model: nn.Module, config: TieringConfig, parts: Assembly, schedule: PassSchedule
) -> list[RowChunks]:
    """What lets blocks run over chunks of rows; nothing if they compute all rows at once."""
    rows = config.tiering.block_rows
    alone = parts.collectives is None
    return [] if rows is None else [RowChunks(model, parts.groups, schedule, rows, alone=alone)]


def _room_for_expert(parts: Assembly) -> Callable[[], Room | None] | None:
    """Leases room for the largest expert that moves; None if there is none."""
    load = parts.plan.workload
    experts = (load.groups[g.index] for g in parts.groups if g.moves and g.routing is not None)
    nbytes = max(map(load.unsharded_bytes, experts), default=0)
    working = parts.tiers.working
    return partial(working.try_lease, nbytes, "unsharded groups") if nbytes else None


def _make_update(config: TieringConfig, parts: Assembly) -> Update:
    return Update(
        config,
        step=parts.plan.workload.step,
        groups=parts.groups,
        gradients=parts.gradients,
        sink=parts.sink,
        optimizer=parts.optimizer,
        collectives=parts.collectives,
        replicas=parts.replicas,
        timeline=parts.tiers.timeline,
    )
