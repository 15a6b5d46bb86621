"""The output of ``tiering plan``: the plan of a model and its forecast, or remedies if it does not fit.

It is printed as text or JSON. JSON is in bytes and seconds, with a schema number that changes when a name is removed or
changes its meaning; names may be added.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tiering.config.training import StepPolicy, TieringConfig, format_size
from tiering.errors import ConfigError, PlacementError
from tiering.placement.placement import place
from tiering.placement.plan import Budgets, Plan
from tiering.placement.workload import Tier, Workload
from tiering.planning.activation_remedies import for_activations
from tiering.planning.activations import PlacedActivations
from tiering.planning.fit import Remedy, fits, remedies
from tiering.planning.forecast import HIDDEN, SECONDS_PER_DAY, Forecast, MachinePart, forecast
from tiering.planning.needs import open_tiers
from tiering.planning.rates import Rates
from tiering.planning.request import ModelSize, Request
from tiering.planning.setting import RatesOf, Setting
from tiering.planning.step_choice import STEPS, choices, choose, seconds_by_step, with_step
from tiering.planning.update_share import best_share

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

SCHEMA_VERSION = 1
COLUMNS = 80
# Parts of the machine that are busy for a smaller fraction of a phase are not printed.
_SHOWN = 0.05
# Days.
_TOO_LONG = 36_500


NOT_COUNTED = (
    "Not counted: activations, which need memory in addition to these budgets. They grow with the tokens of a"
    " micro-batch, and many tokens may not fit although this plan does."
)


@dataclass(frozen=True)
class PlanReport:
    """A model's plan within the budgets of each rank, or the refusal and the remedies if it does not fit.

    ``forecast`` is None, and ``unforeseen`` is the reason, if a rate is missing that the plan needs. ``steps`` has the
    predicted seconds of each StepPolicy with which there is a plan, and ``auto`` is the one that "auto" takes.
    ``activations`` is None if they were not counted. ``assumptions`` are sentences on what nobody asked for, and
    ``configuration`` is the ds_config.json of the plan; None if the run has one already.
    """

    model: str
    params: int
    request: Request
    workload: Workload
    budgets: Budgets
    plan: Plan | None
    refusal: str = ""
    remedies: tuple[Remedy, ...] = ()
    rates: Rates = field(default_factory=Rates)
    forecast: Forecast | None = None
    unforeseen: str = ""
    activations: PlacedActivations | None = None
    steps: Mapping[StepPolicy, float] = field(default_factory=dict)
    auto: StepPolicy = StepPolicy.AFTER
    assumptions: tuple[str, ...] = ()
    configuration: Mapping[str, Any] | None = None

    @property
    def fits(self) -> bool:
        return self.plan is not None

    @property
    def setting(self) -> Setting:
        return self.request.setting

    @property
    def needed(self) -> tuple[Tier, ...]:
        """The tiers of other machines for which nobody gave a budget: the plan says what they need."""
        return open_tiers(self.request.budgets)

    def as_dict(self) -> dict[str, Any]:
        """The report as a JSON value. Sizes are bytes of a rank; times are seconds.

        Figures per second or day, the tokens of a step, and the budgets of remedies are those of a node.
        """
        load = self.workload
        return {
            "schema_version": SCHEMA_VERSION,
            # The former name, for programs that read it.
            "schema": SCHEMA_VERSION,
            "fits": self.fits,
            "model": self.model,
            "parameters": self.params,
            "ranks": load.world_size,
            "ranks_per_node": self.setting.local_size,
            "gpu_memory": self.setting.gpu_memory,
            "stage": load.stage,
            "state": load.state_format,
            "step": load.step.value,
            "auto_step": self.auto.value if self.fits else None,
            "micro_batches": load.micro_batches,
            "micro_batch_tokens": self.setting.tokens,
            # Without a plan, a budget that nobody gave is no number.
            "budgets": {
                tier.value: None if tier in open_tiers(self.budgets) else self.budgets.of(tier)
                for tier in Tier
            },
            "needed": [tier.value for tier in self.needed] if self.fits else [],
            "assumptions": list(self.assumptions),
            "configuration": self.configuration,
            "plan": None if self.plan is None else _plan_dict(self.plan),
            "activations": None if self.activations is None else self.activations.as_dict(),
            "not_counted": ["activations"] if self.activations is None else [],
            "forecast": None if self.forecast is None else self._forecast_dict(self.forecast),
            "unforeseen": self.unforeseen or None,
            "rates": self.rates.as_dict(),
            "refusal": self.refusal or None,
            "remedies": [{"change": dict(each.change), "text": str(each)} for each in self.remedies],
        }

    def _forecast_dict(self, prediction: Forecast) -> dict[str, Any]:
        days = self._drive_days(prediction)
        return {
            "seconds": prediction.seconds,
            "bound": prediction.bound.value,
            "phases": [
                {
                    "name": phase.name,
                    "seconds": phase.seconds,
                    "bound": phase.bound.value,
                    "stalled": phase.stalled,
                    "busy": {part.value: seconds for part, seconds in phase.busy.items() if seconds},
                }
                for phase in prediction.phases
            ],
            "tokens": prediction.tokens,
            "tokens_per_second": prediction.tokens_per_second,
            "efficiency": prediction.efficiency,
            "tokens_that_hide": prediction.tokens_that_hide,
            "nvme_written_per_day": prediction.written_per_day,
            "drive_life": None if days is None else days * SECONDS_PER_DAY,
            "seconds_by_step": {step.value: seconds for step, seconds in self.steps.items()},
        }

    def _drive_days(self, prediction: Forecast) -> float | None:
        return None if self.setting.endurance is None else prediction.drive_days(self.setting.endurance)

    def __str__(self) -> str:
        """The report as plain text with 80 columns."""
        from rich.console import Console

        console = Console(width=COLUMNS, color_system=None)
        with console.capture() as captured:
            self.print(console)
        return captured.get()

    def print(self, console: Console) -> None:
        """Prints the report to ``console``."""
        for part in self._parts():
            # Paths and error codes may contain brackets, which are not markup.
            console.print(part, markup=False, highlight=False)

    def _parts(self) -> Iterator[RenderableType]:
        yield f"{self.model[:1].upper()}{self.model[1:]}."
        yield f"{self._trained()}: {_needs(self.workload)}"
        if self.plan is None:
            yield from self.assumptions
            yield ""
            yield f"Does not fit. {self.refusal}"
            yield ""
            yield (
                "Each of these changes makes it fit:"
                if self.remedies
                else "No change was found that makes it fit."
            )
            yield from (f"  - {each}" for each in self.remedies)
            return
        yield ""
        yield self.plan.table()
        if frozen := self.plan.frozen_swap_bytes:
            yield (
                f"Frozen parameters take {format_size(frozen)} of swap space. They take none if the files that"
                " initialize(weights=...) gets have the same bytes: then they are read in place."
            )
        yield NOT_COUNTED if self.activations is None else str(self.activations)
        yield from self._needed()
        yield from self.assumptions
        yield ""
        if self.forecast is None:
            yield f"No step time: {self.unforeseen}"
        else:
            yield _phases(self.forecast)
            yield from self._outlook(self.forecast)
            yield self._step_table()
        if self.configuration is not None:
            yield ""
            yield "Configuration of this plan:"
            yield json.dumps(self.configuration, indent=1)

    def _step_table(self) -> Table:
        """A row for each step policy, with its predicted time."""
        from tiering._figures_table import FiguresTable

        table = FiguresTable.plain(title="Predicted step by tiering.step")
        for name in ("step", "seconds", ""):
            table.add_column(name, justify="right" if name == "seconds" else "left", no_wrap=bool(name))
        for step, seconds in self.steps.items():
            notes = ["this plan"] * (step is self.workload.step) + ['taken by "auto"'] * (step is self.auto)
            if step is StepPolicy.IN_BACKWARD:
                conditions = [condition for condition, _ in self.request.config.conflicts_in_backward()]
                notes += [f"refused with {' and '.join(conditions)}"] * bool(conditions)
            table.add_row(step.value, _seconds(seconds), ", ".join(notes))
        return table

    def _trained(self) -> str:
        load, setting = self.workload, self.setting
        memory = setting.gpu_memory
        device = "the CPU" if memory is None else f"GPUs of {format_size(memory)}"
        ranks = f", each of {load.world_size} ranks in stage {load.stage}" if load.world_size > 1 else ""
        return f"Trained in {load.compute_dtype} with {load.state_format} state on {device}{ranks}"

    def _needed(self) -> Iterator[str]:
        """A line with what each node needs, where nobody gave a budget."""
        names = {Tier.HOST: "host memory", Tier.NVME: "NVMe"}
        sizes = [
            f"{format_size(self.budgets.of(tier) * self.setting.local_size)} of {names[tier]}"
            for tier in self.needed
        ]
        if not sizes:
            return
        options = " and ".join(f"--{tier.value}-budget" for tier in self.needed)
        yield f"Each node needs {' and '.join(sizes)}. If your nodes have more, give it by {options}."
        if self.plan is not None and self.plan.host_without_nvme is not None:
            most = format_size(self.plan.host_without_nvme * self.setting.local_size)
            yield f"With a host budget of {most} for each node, a step moves nothing over NVMe."

    def _outlook(self, prediction: Forecast) -> Iterator[str]:
        """Lines with the figures that follow from the step's time."""
        suffix = " on each node" if self.setting.world_size > self.setting.local_size else ""
        yield (
            f"{prediction.tokens_per_second:,.0f} tokens per second{suffix}; the device computes for"
            f" {prediction.efficiency:.0%} of a step."
        )
        if prediction.read or prediction.written:
            yield (
                f"{prediction.tokens_that_hide:,} tokens per micro-batch and rank hide NVMe (stalls below"
                f" {1 - HIDDEN:.0%} of a step); this is for {self.setting.tokens:,}."
            )
        if prediction.written:
            yield f"Written to NVMe in a day{suffix}: {format_size(prediction.written_per_day)}."
        days = self._drive_days(prediction)
        if days is not None:
            assert self.setting.endurance is not None
            life = f"{days:,.{0 if days >= 10 else 1}f} days" if days < _TOO_LONG else "more than 100 years"
            yield f"Drive life, of {self.setting.endurance / 1e12:,.0f} TB written{suffix}: {life}."


def report(
    model: ModelSize, load: Workload, config: TieringConfig, setting: Setting, rates: RatesOf
) -> PlanReport:
    """Plans ``load`` of ``model`` within the budgets of ``config`` and forecasts its step at ``rates``, if it fits.

    "auto" budgets are this machine's, or what the plan needs of another one. Raises SwapSpaceError if the NVMe budget
    is "auto" and a directory cannot hold swap space.
    """
    return report_on(Request(model, load, config, setting.following(config)), rates)


def report_on(request: Request, rates: RatesOf) -> PlanReport:
    """As ``report``, of ``request``."""
    try:
        first, _ = request.plan(place)
    except PlacementError as refusal:
        model, offers = request.model, tuple(_remedies(request))
        return PlanReport(
            model.name, model.params, request, request.load, request.budgets, None, str(refusal), offers
        )
    return _planned(request, first.budgets, rates)


def _planned(request: Request, budgets: Budgets, rates: RatesOf) -> PlanReport:
    """The report of ``request``, which has a plan within ``budgets``."""
    model, setting, unforeseen = request.model, request.setting, ""
    rates_of_load = rates if isinstance(rates, Rates) else rates(request.load)
    settled, share = request.at(rates_of_load), 0.0
    if request.config.tiering.update_on_device == "auto":
        share = best_share(request.load, budgets, rates_of_load.of_rank(setting.local_size))
    settled = settled.with_share(share) if share else settled
    try:
        plan, placed = settled.plan()
    except PlacementError:
        # The activations may need the memory that the share or the slots take.
        settled = request
        plan, placed = settled.plan()
    exact = choices(plan, clips=bool(request.config.gradient_clipping))
    auto = choose(exact, seconds_by_step(plan, exact, rates_of_load, local_ranks=setting.local_size))
    if request.config.tiering.step is StepPolicy.AUTO:
        plan = with_step(plan, auto)
    predict = partial(
        forecast,
        rates=rates_of_load,
        tokens=setting.tokens,
        local_ranks=setting.local_size,
        checkpointed=setting.checkpointed,
        chunks=setting.chunks,
        active=model.active,
        attention_flops=model.attention_flops,
        computed=model.computed,
    )
    prediction, steps = None, dict[StepPolicy, float]()
    try:
        prediction = predict(plan)
        steps = {step: predict(planned).seconds for step, planned in _by_step(settled, plan)}
    except ConfigError as missing:
        unforeseen = str(missing)
    return PlanReport(
        model.name,
        model.params,
        request,
        plan.workload,
        plan.budgets,
        plan,
        rates=rates_of_load,
        forecast=prediction,
        unforeseen=unforeseen,
        activations=placed,
        steps=steps,
        auto=auto,
    )


def _by_step(request: Request, plan: Plan) -> Iterator[tuple[StepPolicy, Plan]]:
    """Each step with which ``request``, whose plan is ``plan``, has a plan."""
    for step in STEPS:
        if step is plan.workload.step:
            yield step, plan
            continue
        try:
            yield step, request.with_step(step).plan(place)[0]
        except PlacementError:
            continue


def _remedies(request: Request) -> Iterator[Remedy]:
    """Changes with which the model and its activations fit."""
    setting, budgets, load = request.setting, request.budgets_without_activations, request.load
    if request.sizes is not None and fits(load, budgets):
        yield from for_activations(request, budgets)
    for offer in (*remedies(load, budgets, local_ranks=setting.local_size), *_tiles(request)):
        if setting.gpu_memory is not None and offer.budgets.device > max(setting.gpu_memory, budgets.device):
            continue
        offer = _with_both_budgets(offer, request.config, setting)
        if request.sizes is None:
            yield offer
            continue
        # The activations may need a change of their own besides: the one with the fewest parts.
        least = next(for_activations(request.changed(offer.change, offer.workload), offer.budgets), None)
        if least is not None:
            yield replace(least, change={**offer.change, **least.change})


def _tiles(request: Request) -> Iterator[Remedy]:
    """The largest tile with which the layers fit, if they do not fit whole."""
    tiling = request.model.tiling
    if tiling is None:
        return
    for tile in tiling.sizes(request.load, request.budgets_without_activations):
        change, load = {"tiering.tile": tile}, tiling.load(tile)
        if load is None:
            return
        tiled = request.changed(change, load)
        if fits(load, tiled.budgets_without_activations):
            yield Remedy(change, tiled.load, tiled.budgets_without_activations)
            return


def _with_both_budgets(offer: Remedy, config: TieringConfig, setting: Setting) -> Remedy:
    """``offer`` with both budgets if device and host share memory: an "auto" budget shrinks if the other is raised."""
    if setting.gpu_memory is not None or not any(
        f"tiering.{tier.value}_budget" in offer.change for tier in (Tier.DEVICE, Tier.HOST)
    ):
        return offer
    budgets = {
        f"tiering.{tier.value}_budget": offer.budgets.of(tier) * setting.local_size
        for tier in (Tier.DEVICE, Tier.HOST)
        if getattr(config.tiering, f"{tier.value}_budget") == "auto"
    }
    return replace(offer, change={**offer.change, **budgets})


def _plan_dict(plan: Plan) -> dict[str, Any]:
    read, written = plan.nvme_traffic()
    return {
        "tiers": {
            tier.value: {"planned": plan.total(tier), "contents": plan.contents(tier)} for tier in Tier
        },
        "in_place": plan.in_place_bytes,
        "nvme_read": read,
        "nvme_written": written,
        "nvme_moved_by_state": dict(plan.moved_by_format),
        "sent": plan.sent_bytes(),
        "updated": plan.updated(),
        "staging": plan.staging_figures(),
    }


def _needs(load: Workload) -> str:
    """The bytes of the model that a rank keeps, on all tiers."""
    params = sum(count * load.home_bytes(group) for group, count in load.alike)
    grads = sum(count * load.home_grad_bytes(group) for group, count in load.alike) + load.local_grad_bytes
    state = sum(count * load.state_bytes(group) for group, count in load.alike)
    return (
        f"{format_size(params + grads + state)}, of which parameters {format_size(params)}, gradients"
        f" {format_size(grads)}, optimizer state {format_size(state)}."
    )


def _phases(prediction: Forecast) -> Table:
    from tiering._figures_table import FiguresTable

    table = FiguresTable.plain(title="Predicted step")
    table.add_column("phase", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("bounded by", no_wrap=True)
    table.add_column("busy for")
    for phase in prediction.phases:
        parts = sorted(MachinePart, key=lambda part: -phase.busy[part])
        busy = [
            f"{part.value} {_seconds(phase.busy[part])}"
            for part in parts
            if phase.busy[part] > _SHOWN * phase.seconds
        ]
        table.add_row(phase.name, _seconds(phase.seconds), phase.bound.value, ", ".join(busy) or "-")
    table.add_row("all", _seconds(prediction.seconds), prediction.bound.value, "")
    return table


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 100 else f"{seconds:.3g}"
