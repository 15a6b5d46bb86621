"""Remedies for activations that a GPU cannot hold: where they wait, what is saved, and how many tokens. Pure.

A plan exists for each change that is returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

from tiering.placement.budgets import MIB
from tiering.placement.placement import place
from tiering.placement.plan import Budgets
from tiering.placement.workload import Tier
from tiering.planning.activations import with_activations
from tiering.planning.fit import Remedy, fits, least_budget
from tiering.planning.request import OF_SETTING, Request
from tiering.planning.setting import LOSS_CHUNK
from tiering.storage.arena import round_up

# Tokens are offered in multiples of it, or of a sequence.
TOKENS_STEP = 256
Change = Mapping[str, int | str]


def for_activations(request: Request, budgets: Budgets) -> Iterator[Remedy]:
    """Changes with which the activations of ``request`` fit: as few together as possible, swap space, fewer tokens.

    Its load fits ``budgets``, which the activations do not limit. The change is empty if its activations fit already.
    """
    changes = list(_changes(request))
    found = False
    for count in range(len(changes) + 1):
        for chosen in combinations(changes, count):
            change = _joined(chosen)
            if request.changed(change).fits:
                found = True
                yield Remedy(change, request.load, budgets)
        if found:
            break
    if not found:
        yield from _more_swap_space(request, budgets)
    # Host memory may have no room for activations: without those changes, too.
    in_setting = [each for each in changes if each.keys() <= OF_SETTING.keys()]
    together = [] if found else [_joined(each) for each in (changes, in_setting) if each]
    alone: list[Change] = [{}]
    for alternatives in (alone, together):
        fewer = next(filter(None, (_fewer_tokens(request, each) for each in alternatives)), None)
        if fewer is not None:
            yield Remedy(fewer, request.load, budgets)


def _more_swap_space(request: Request, budgets: Budgets) -> Iterator[Remedy]:
    """The swap space that the activations need besides the load, which has enough, if they fit with it."""
    assert request.sizes is not None
    config, setting, load = request.config, request.setting, request.load
    moving, placed = with_activations(load, place(load, budgets), config, setting, request.sizes)
    if placed.fits and not fits(moving, budgets):
        larger = least_budget(moving, budgets, Tier.NVME)
        if larger is not None:
            yield Remedy({"tiering.nvme_budget": larger.nvme * setting.local_size}, moving, larger)


def _changes(request: Request) -> Iterator[Change]:
    """Changes that are not in use yet."""
    tiering, swaps = request.config.tiering, bool(request.config.zero.swap_directories)
    assert request.sizes is not None
    # With swap space, the memory of activations limits nothing.
    needed = 0 if swaps else round_up(request.sizes.saved, MIB)
    budget = {"tiering.activation_budget": needed} if needed > tiering.activation_budget else {}
    if tiering.activations == "device" or (tiering.activations == "host" and swaps):
        yield {"tiering.activations": "auto", **budget}
    elif budget:
        yield budget
    if not request.setting.checkpointed:
        yield {"checkpointing": True}
    if not request.setting.loss_chunk:
        yield {"loss_chunk": LOSS_CHUNK}


def _fewer_tokens(request: Request, others: Change) -> Change | None:
    """The most tokens of a micro-batch with which there is a plan, with ``others``; None if there is none."""
    sequence, tokens = request.setting.sequence, request.setting.tokens
    step = sequence if sequence and sequence < tokens else TOKENS_STEP

    def change(count: int) -> Change:
        # Of one sequence, a part.
        shorter = {"sequence": count * step} if sequence == tokens else {}
        return {"tokens": count * step, **shorter, **others}

    few, many = 0, -(-tokens // step)
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if request.changed(change(middle)).fits else (few, middle)
    return change(few) if few else None


def _joined(changes: tuple[Change, ...] | list[Change]) -> Change:
    return {key: value for change in changes for key, value in change.items()}
