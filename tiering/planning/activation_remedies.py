"""Remedies for activations that a GPU cannot hold: where they wait, what is saved, and how many tokens. Pure.

A plan exists for each change that is returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from tiering.config.training import TieringConfig
from tiering.errors import PlacementError
from tiering.placement.placement import place
from tiering.placement.plan import Budgets, Plan
from tiering.placement.workload import Workload
from tiering.planning.activations import ActivationsOf, PlacedActivations, with_activations
from tiering.planning.fit import Remedy
from tiering.planning.setting import LOSS_CHUNK, Setting, with_changes
from tiering.storage.arena import round_up

MIB = 1 << 20
# Tokens are offered in multiples of it, or of a sequence.
TOKENS_STEP = 256
# Fields of Setting by the name of their change.
_OF_SETTING = {"checkpointing": "checkpointed"} | {
    name: name for name in ("loss_chunk", "tokens", "sequence")
}

Change = Mapping[str, int | str]


def for_activations(
    load: Workload, budgets: Budgets, config: TieringConfig, setting: Setting, sizes: ActivationsOf
) -> Iterator[Remedy]:
    """Changes with which the activations ``sizes`` fit: as few together as possible, then fewer tokens.

    ``load`` fits. The change is empty if its activations fit already.
    """
    run = _Run(load, budgets, config, setting, sizes, place(load, budgets))
    changes = list(run.changes())
    found = False
    for count in range(len(changes) + 1):
        for chosen in combinations(changes, count):
            change = _joined(chosen)
            if run.fits_beside_plan(change) and run.fits(change):
                found = True
                yield Remedy(change, load, budgets)
        if found:
            break
    # Host memory may have no room for activations: without those changes, too.
    in_setting = [each for each in changes if each.keys() <= _OF_SETTING.keys()]
    together = [] if found else [_joined(each) for each in (changes, in_setting) if each]
    alone: list[Change] = [{}]
    for alternatives in (alone, together):
        fewer = next(filter(None, map(run.fewer_tokens, alternatives)), None)
        if fewer is not None:
            yield Remedy(fewer, load, budgets)


@dataclass(frozen=True)
class _Run:
    """What a plan is made of; ``plan`` is that of ``load`` without changes."""

    load: Workload
    budgets: Budgets
    config: TieringConfig
    setting: Setting
    sizes: ActivationsOf
    plan: Plan

    def changes(self) -> Iterator[Change]:
        """Changes that are not in use yet."""
        tiering, swaps = self.config.tiering, bool(self.config.zero.swap_directories)
        # With swap space, the memory of activations limits nothing.
        needed = 0 if swaps else round_up(self.sizes(self.setting).saved, MIB)
        budget = {"tiering.activation_budget": needed} if needed > tiering.activation_budget else {}
        if tiering.activations == "device" or (tiering.activations == "host" and swaps):
            yield {"tiering.activations": "auto", **budget}
        elif budget:
            yield budget
        if not self.setting.checkpointed:
            yield {"checkpointing": True}
        if not self.setting.loss_chunk:
            yield {"loss_chunk": LOSS_CHUNK}

    def fewer_tokens(self, others: Change) -> Change | None:
        """The most tokens of a micro-batch that fit beside the plan, with ``others``; None if there is no plan."""
        sequence, tokens = self.setting.sequence, self.setting.tokens
        step = sequence if sequence and sequence < tokens else TOKENS_STEP

        def change(count: int) -> Change:
            # Of one sequence, a part.
            shorter = {"sequence": count * step} if sequence == tokens else {}
            return {"tokens": count * step, **shorter, **others}

        few, many = 0, -(-tokens // step)
        while many - few > 1:
            middle = (few + many) // 2
            few, many = (middle, many) if self.fits_beside_plan(change(middle)) else (few, middle)
        return change(few) if few and self.fits(change(few)) else None

    def fits_beside_plan(self, change: Change) -> bool:
        """Whether a GPU has room for what stays on it, if its use by the plan is the same with ``change``."""
        return self._with(change, self.plan)[1].fits

    def fits(self, change: Change) -> bool:
        """Whether there is a plan with ``change``, too."""
        load, placed = self._with(change, self.plan)
        try:
            return placed.fits and self._with(change, place(load, self.budgets))[1].fits
        except PlacementError:
            return False

    def _with(self, change: Change, plan: Plan) -> tuple[Workload, PlacedActivations]:
        own: dict[str, Any] = {_OF_SETTING[key]: value for key, value in change.items() if key in _OF_SETTING}
        setting = replace(self.setting, **own)
        tiers = {key.removeprefix("tiering."): change[key] for key in change if key.startswith("tiering.")}
        config = with_changes(self.config, tiers=tiers) if tiers else self.config
        return with_activations(self.load, plan, config, setting, self.sizes(setting))


def _joined(changes: tuple[Change, ...] | list[Change]) -> Change:
    return {key: value for change in changes for key, value in change.items()}
