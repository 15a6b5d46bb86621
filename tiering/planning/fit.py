"""Remedies for a model that does not fit: changes of budgets or of the configuration. Pure.

A plan exists for each change that is returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from tiering.config.fields import format_need
from tiering.placement.configured import OFFLOAD_TIERS
from tiering.placement.group_sizes import GroupSizes, shard_quantum
from tiering.placement.placement import BudgetError, place
from tiering.placement.plan import Budgets
from tiering.placement.workload import Tier, Workload
from tiering.storage.arena import PAGE, round_up

UNLIMITED = 1 << 60
# The least budget is found to a memory page, or to this fraction (1/n) of it.
FINEST = 1 << 12
MOST_RANKS = 4096
# Refusals whose bytes a search follows, before it doubles the budget.
MOST_REFUSALS = 8

# Changes that no key of the configuration makes.
_BESIDE_CONFIGURATION = {
    "ranks": "{value} ranks, each with these budgets",
    "gpu": "GPUs of {value}",
    "tokens": "at most {value} tokens in a micro-batch (--tokens {value})",
    "sequence": "sequences of at most {value} (--sequence {value})",
    "checkpointing": "activation checkpointing (--checkpointing)",
    "loss_chunk": "tiering.chunked_cross_entropy as the loss (--chunked-loss)",
}
# The devices of the configuration, fastest first.
_SLOWER = tuple(OFFLOAD_TIERS)


@dataclass(frozen=True)
class Remedy:
    """A change with which the model fits: new values by configuration key.

    Budgets in ``change`` are bytes of a node. Other names are those of the run: ``ranks`` is the number of all ranks,
    ``gpu`` the bytes of a GPU, ``tokens`` those of a micro-batch, ``sequence`` those of a sequence, ``checkpointing``
    is true, ``loss_chunk`` that of ``Setting``. ``workload`` and ``budgets`` (of a rank) are those of the plan.
    """

    change: Mapping[str, int | str]
    workload: Workload
    budgets: Budgets

    def __str__(self) -> str:
        return ", ".join(self._text(key, value) for key, value in self.change.items())

    def _text(self, key: str, value: int | str) -> str:
        if key in _BESIDE_CONFIGURATION:
            value = format_need(int(value)) if key == "gpu" else value
            return _BESIDE_CONFIGURATION[key].format(value=value)
        name = key.rpartition("tiering.")[2].removeprefix("zero_optimization.")
        if name == "tile":
            return f"tile of {format_need(int(value))}"
        if not name.endswith("_budget"):
            return f"{name} {value!r}" if isinstance(value, str) else f"{name} {value}"
        tier = name.removesuffix("_budget")
        own = self.budgets.of(Tier(tier)) if tier in {each.value for each in Tier} else value
        each = f" ({format_need(int(own))} for each rank)" if own != value else ""
        return f"{name} of {format_need(int(value))}{each}"


def remedies(load: Workload, budgets: Budgets, *, local_ranks: int = 1) -> list[Remedy]:
    """Changes that make ``load`` fit, smallest first; empty if it fits each rank's ``budgets``.

    First changes of the configuration alone; then the least budget of each tier, if raising one budget is enough; then
    the least budgets of several tiers together; then more ranks with the same budgets.
    """
    search = Search(load)
    if search.fits(budgets):
        return []
    offers = [*_other_configurations(load, budgets, local_ranks)]
    for tier in Tier:
        least = search.least(budgets, tier)
        if least is not None:
            offers.append(_raised(load, budgets, least, local_ranks))
    return [*offers, *_raised_together(search, budgets, local_ranks), *_more_ranks(load, budgets)]


def fits(load: Workload, budgets: Budgets) -> bool:
    """Whether a plan exists."""
    return Search(load).fits(budgets)


def least_budget(load: Workload, budgets: Budgets, tier: Tier) -> Budgets | None:
    """``budgets`` with the least of ``tier`` with which ``load`` fits; None if no budget of that tier alone does.

    More than it has now, if it does not fit now.
    """
    return Search(load).least(budgets, tier)


class Search:
    """Looks for budgets in which ``load`` fits. Each budgets are planned once."""

    def __init__(self, load: Workload) -> None:
        self.load = load
        self._refusals: dict[Budgets, BudgetError | None] = {}

    def fits(self, budgets: Budgets) -> bool:
        """Whether a plan exists."""
        return self._refusal(budgets) is None

    def least(self, budgets: Budgets, tier: Tier) -> Budgets | None:
        """As ``least_budget``."""
        if not self.fits(budgets.having(tier, UNLIMITED)):
            return None
        too_small, enough = self._bounds(budgets, tier)
        # A refusal names bytes that are usually the least.
        middle = enough - _precision(enough)
        while enough - too_small > _precision(enough):
            fit = self.fits(budgets.having(tier, middle))
            too_small, enough = (too_small, middle) if fit else (middle, enough)
            middle = round_up((too_small + enough) // 2)
        return budgets.having(tier, enough)

    def _bounds(self, budgets: Budgets, tier: Tier) -> tuple[int, int]:
        """Bytes of ``tier`` that are too few, or 0, and bytes that are enough: as many as the refusals name."""
        too_small = 0 if self.fits(budgets) else budgets.of(tier) // PAGE * PAGE
        enough, refused = too_small, 0
        while (refusal := self._refusal(budgets.having(tier, enough))) is not None:
            too_small, refused = enough, refused + 1
            named = round_up(refusal.nbytes) if refusal.tier is tier else 0
            if (tier, refusal.tier) == (Tier.HOST, Tier.NVME):
                # Each byte in host memory saves at most one there.
                named = round_up(enough + refusal.nbytes - budgets.nvme)
            doubled = max(PAGE, 2 * enough)
            enough = named if enough < named and refused <= MOST_REFUSALS else doubled
        return too_small, enough

    def _refusal(self, budgets: Budgets) -> BudgetError | None:
        """The refusal of a plan; None if a plan exists."""
        if budgets not in self._refusals:
            try:
                place(self.load, budgets)
                self._refusals[budgets] = None
            except BudgetError as refusal:
                self._refusals[budgets] = refusal
        return self._refusals[budgets]


def _precision(enough: int) -> int:
    """The precision to which a budget of about ``enough`` bytes is found."""
    return max(PAGE, round_up(enough // FINEST))


def of_ranks(load: Workload, ranks: int) -> Workload:
    """``load`` on ``ranks`` ranks: groups padded so that their shards are equal. A multiple of those it has now.

    Several ranks also have gaps between parameters, of less than SQUARE_BLOCK elements each: they are not counted.
    """

    def padded(numel: int) -> int:
        return round_up(numel, shard_quantum(ranks) * ranks)

    def of(group: GroupSizes) -> GroupSizes:
        frozen = group.param_bytes // load.of(group).compute_itemsize - group.trainable_numel
        trained = padded(group.trainable_numel)
        nbytes = (trained + padded(frozen)) * load.of(group).compute_itemsize
        # Sizes that are padded already are those of many ranks.
        if (trained, nbytes) == (group.trainable_numel, group.param_bytes):
            return group
        return replace(group, param_bytes=nbytes, trainable_numel=trained)

    groups, *finer = (tuple(map(of, cut)) for cut in (load.groups, *load.finer))
    return replace(load, groups=groups, finer=tuple(finer), world_size=ranks)


def _other_configurations(load: Workload, budgets: Budgets, local_ranks: int) -> Iterator[Remedy]:
    """Changes of one key of the configuration each."""
    alone: list[tuple[dict[str, int | str], Workload]] = []
    if load.world_size > 1 and load.stage < 3:
        sharded = replace(load, stage=3)
        if load.sent_itemsize > load.compute_itemsize and not fits(sharded, budgets):
            smaller = replace(sharded, reduce_itemsize=load.compute_itemsize)
            alone.append(
                ({"zero_optimization.stage": 3, "tiering.reduce_dtype": load.compute_dtype}, smaller)
            )
        alone.append(({"zero_optimization.stage": 3}, sharded))
    if load.grad_itemsize > load.compute_itemsize and not load.whole_groups:
        smaller = replace(load, grad_itemsize=load.compute_itemsize)
        alone.append(({"tiering.grad_accum_dtype": load.compute_dtype}, smaller))
    if not load.whole_groups:  # an optimizer without a kernel keeps its own state, in fp32
        for other in load.other_formats():
            if other.state_itemsize < load.state_itemsize:
                alone.append(({"tiering.state": other.state_format}, other))
    yield from (Remedy(change, other, budgets) for change, other in alone if fits(other, budgets))
    for change, other in _slower_tiers(load):
        if fits(other, budgets):
            yield Remedy(change, other, budgets)
            return
        more = least_budget(other, budgets, Tier.NVME)
        if more is not None:
            yield Remedy(change | changed_budgets(budgets, more, local_ranks), other, more)
            return


def _slower_tiers(load: Workload) -> Iterator[tuple[dict[str, int | str], Workload]]:
    """The same with parameters and optimizer state allowed on slower tiers, as few steps down as possible first."""
    if load.whole_groups:
        return
    names = {tier: name for name, tier in OFFLOAD_TIERS.items()}
    current = (_SLOWER.index(names[load.offload_param]), _SLOWER.index(names[load.offload_optimizer]))
    steps = product(range(current[0], len(_SLOWER)), range(current[1], len(_SLOWER)))
    for param, optimizer in sorted(steps, key=sum):
        # A GPU that keeps optimizer state does not reach parameters on NVMe.
        unreached = _SLOWER[param] == "nvme" and not load.device_is_host
        if (param, optimizer) == current or (unreached and not optimizer):
            continue
        change: dict[str, int | str] = {}
        stage = max(load.stage, 3 if param else 1)
        if stage != load.stage:
            change["zero_optimization.stage"] = stage
        if param != current[0]:
            change["zero_optimization.offload_param.device"] = _SLOWER[param]
        if optimizer != current[1]:
            change["zero_optimization.offload_optimizer.device"] = _SLOWER[optimizer]
        other = replace(
            load,
            offload_param=OFFLOAD_TIERS[_SLOWER[param]],
            offload_optimizer=OFFLOAD_TIERS[_SLOWER[optimizer]],
            stage=stage,
        )
        if unreached and load.offload_ratio < 1:
            change["zero_optimization.offload_optimizer.ratio"] = 1
            other = replace(other, offload_ratio=1.0)
        yield change, other


def _more_ranks(load: Workload, budgets: Budgets) -> Iterator[Remedy]:
    """The least power of two times as many ranks, each with the same budgets."""
    if load.is_irrevocable or load.stage == 0:
        return
    ranks = 2 * load.world_size
    while ranks <= MOST_RANKS:
        larger = of_ranks(load, ranks)
        if fits(larger, budgets):
            yield Remedy({"ranks": ranks}, larger, budgets)
            return
        ranks *= 2


def _raised_together(search: Search, budgets: Budgets, local_ranks: int) -> Iterator[Remedy]:
    """The least budgets that are enough together, if more than one has to be raised: of the device first, since that
    memory is the scarcest, then of the host. If the CPU computes, the device would need least if the host had all.
    """
    together = Budgets(UNLIMITED, UNLIMITED, UNLIMITED)
    first = (Tier.HOST, Tier.DEVICE) if search.load.device_is_host else (Tier.DEVICE, Tier.HOST)

    def lowered(tier: Tier) -> Budgets | None:
        least = search.least(together, tier)
        return least and together.having(tier, max(least.of(tier), budgets.of(tier)))

    for tier in (*first, Tier.NVME):
        less = lowered(tier)
        if less is None:
            return
        together = less
    if len(changed_budgets(budgets, together, local_ranks)) > 1:
        # Groups that compute in host memory, for which the device has no room now, need no window there.
        yield _raised(search.load, budgets, lowered(first[0]) or together, local_ranks)


def _raised(load: Workload, current: Budgets, raised: Budgets, local_ranks: int) -> Remedy:
    return Remedy(changed_budgets(current, raised, local_ranks), load, raised)


def changed_budgets(current: Budgets, raised: Budgets, local_ranks: int) -> dict[str, int | str]:
    """The budgets of a node that differ."""
    return {
        f"tiering.{tier.value}_budget": raised.of(tier) * local_ranks
        for tier in Tier
        if raised.of(tier) != current.of(tier)
    }
