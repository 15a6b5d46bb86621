"""A request for a plan: a model, its workload, the configuration and the setting; and the plan beside its activations.

Pure but for budgets of "auto", which are those of this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tiering.config.training import StepPolicy, TieringConfig
from tiering.errors import PlacementError
from tiering.placement.budgets import beside_activations, resolve_budgets
from tiering.placement.placement import make_plan, place
from tiering.placement.plan import Budgets, Plan
from tiering.placement.tile_sizes import Tiling
from tiering.placement.workload import Tier, Workload
from tiering.planning.activations import (
    Activations,
    ActivationsOf,
    PlacedActivations,
    beside_budget,
    with_activations,
)
from tiering.planning.needs import place_with_needs, with_needed_nvme
from tiering.planning.rates import Rates
from tiering.planning.setting import Setting, with_changes

# Fields of Setting by the name of their change.
OF_SETTING = {
    "gpu": "gpu_memory",
    "checkpointing": "checkpointed",
    "loss_chunk": "loss_chunk",
    "tokens": "tokens",
    "sequence": "sequence",
}


@dataclass(frozen=True)
class ModelSize:
    """The size of a model, with its ``name`` for the report; ``params`` counts its parameters.

    ``active``, ``attention_flops`` and ``computed`` are those of ``forecast``. ``activations``: those of a micro-batch;
    None if they are unknown. ``tiling``: the model in tiles; None if it is unknown.
    """

    name: str
    params: int
    active: float = 1.0
    attention_flops: float = 0.0
    computed: int | None = None
    activations: ActivationsOf | None = None
    tiling: Tiling | None = None


@dataclass(frozen=True)
class Request:
    """What is to be planned. ``measured``: the budgets of a rank that are "auto", if they are known already."""

    model: ModelSize
    load: Workload
    config: TieringConfig
    setting: Setting
    measured: Budgets | None = None

    @cached_property
    def sizes(self) -> Activations | None:
        """The activations; None if they are unknown."""
        return None if self.model.activations is None else self.model.activations(self.setting)

    @cached_property
    def budgets(self) -> Budgets:
        """The budgets of a rank. An "auto" budget of a GPU is what activations and gradients leave of it.

        Raises SwapSpaceError if the NVMe budget is "auto" and a directory cannot hold swap space.
        """
        return self._with_room(self.beside) if self.limits_device else self._resolved

    @cached_property
    def budgets_without_activations(self) -> Budgets:
        """The budgets of a rank if activations needed no memory of a GPU."""
        return self._with_room(self.load.gradients_beside) if self.limits_device else self._resolved

    @property
    def beside(self) -> int:
        """Bytes of a GPU that the activations, which are known, and gradients in torch need."""
        assert self.sizes is not None
        return beside_budget(self.load, self.config, self.sizes)

    @property
    def has_room_for_activations(self) -> bool:
        """Whether a GPU holds the activations alone, as far as they are known."""
        gpu = self.setting.gpu_memory
        return gpu is None or self.sizes is None or self.beside - self.load.gradients_beside <= gpu

    @property
    def limits_device(self) -> bool:
        """Whether the device budget is what the activations leave of a GPU."""
        automatic = self.config.tiering.device_budget == "auto"
        return automatic and self.sizes is not None and self.setting.gpu_memory is not None

    def _with_room(self, nbytes: int) -> Budgets:
        assert self.setting.gpu_memory is not None
        return beside_activations(self._resolved, self.setting.gpu_memory, nbytes)

    @cached_property
    def _resolved(self) -> Budgets:
        """The budgets of a rank, without a look at activations."""
        tiers, local_ranks = self.config.tiering, self.setting.local_size
        if self.measured is not None:
            measured = {f"{tier.value}_budget": self.measured.of(tier) * local_ranks for tier in Tier}
            tiers = tiers.model_copy(
                update={key: nbytes for key, nbytes in measured.items() if getattr(tiers, key) == "auto"}
            )
        return resolve_budgets(
            tiers,
            device_memory=self.setting.gpu_memory,
            nvme_paths=self.config.zero.swap_directories,
            ranks_on_node=local_ranks,
            elsewhere=self.setting.elsewhere,
        )

    def plan(
        self, make: Callable[[Workload, Budgets], Plan] = make_plan
    ) -> tuple[Plan, PlacedActivations | None]:
        """The plan of ``make``, with the activations if they are known. Raises PlacementError if one does not fit."""
        try:
            return self._planned(make)
        except PlacementError:
            if not self._has_first:
                self._refuse()
            raise

    def _planned(self, make: Callable[[Workload, Budgets], Plan]) -> tuple[Plan, PlacedActivations | None]:
        first = self._first
        if self.sizes is None:
            return with_needed_nvme(make(self.load, first.budgets)), None
        load, placed = with_activations(self.load, first, self.config, self.setting, self.sizes)
        placed.check(self.setting)
        return with_needed_nvme(make(load, first.budgets)), placed

    @cached_property
    def _first(self) -> Plan:
        """The plan without what depends on it: the activations that move."""
        return place_with_needs(self.load, self.budgets)

    @cached_property
    def _has_first(self) -> bool:
        try:
            return bool(self._first)
        except PlacementError:
            return False

    @cached_property
    def fits(self) -> bool:
        """Whether there is a plan."""
        if not self.has_room_for_activations or not self._has_first:
            return False
        try:
            self._planned(place)
        except PlacementError:
            return False
        return True

    def changed(self, change: Mapping[str, int | str], load: Workload | None = None) -> Request:
        """The same with the values of ``change``, a remedy; ``load`` if it is another workload."""
        own: dict[str, Any] = {OF_SETTING[key]: value for key, value in change.items() if key in OF_SETTING}
        tiers = {
            key.removeprefix("tiering."): value for key, value in change.items() if key.startswith("tiering.")
        }
        return replace(
            self,
            load=self.load if load is None else load,
            config=with_changes(self.config, tiers=tiers) if tiers else self.config,
            setting=replace(self.setting, **own) if own else self.setting,
            measured=self._resolved,
        )

    def at(self, rates: Rates) -> Request:
        """The same with staging for drives of these ``rates``."""
        paths = len(self.config.zero.offload_optimizer.swap_directories)
        if not paths:
            return self
        load = replace(self.load, disk=rates.disk(paths, self.setting.local_size))
        return replace(self, load=load, measured=self._resolved)

    def with_share(self, share: float) -> Request:
        """The same with ``share`` of the state in host memory updated by the GPU."""
        load = replace(self.load, update_on_device=share)
        return replace(self, load=load, measured=self._resolved)

    def with_step(self, step: StepPolicy) -> Request:
        """The same with another ``step``."""
        return replace(self, load=replace(self.load, step=step), measured=self._resolved)

    def _refuse(self) -> None:
        """Raise PlacementError, with its reason: the activations, or what does not fit without them either."""
        plan = make_plan(self.load, self.budgets_without_activations)
        if self.sizes is not None:
            with_activations(self.load, plan, self.config, self.setting, self.sizes)[1].check(self.setting)
        make_plan(self.load, self.budgets)
