"""Advice: each problem of a run in plain words, with a remedy. Pure: a RunView in, a list of Advice out.

    advice.py         the Advice model
    stalls.py         figures that several rules share: stalls by cause, typical steps
    larger_budget.py  the effect of a larger host budget
    ranks.py          ranks that are missing or dead, and stragglers
    nvme.py           steps that wait for NVMe
    link.py           steps that wait for copies to or from a GPU
    step_time.py      steps that hang, are slow outside the engine, or have become slower
    disks.py, memory.py, training.py

Each rule takes a run and yields Advice. A comment at each threshold gives its reason. Rules use figures of the recent
steps where there are enough of them; counters of events that should never happen are those of the whole run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from service.advice import disks, link, memory, nvme, ranks, step_time, training
from service.advice.advice import Advice, Severity
from service.advice.ranks import stragglers
from service.view import RunView

__all__ = ["Advice", "Severity", "advise", "stragglers"]

_RULES: tuple[Callable[[RunView], Iterator[Advice]], ...] = (
    ranks.states,
    disks.errors,
    training.broken,
    training.diverged,
    training.failed_saves,
    training.skipping,
    step_time.stuck,
    nvme.bound,
    link.bound,
    ranks.stragglers_or_network,
    step_time.update_bound,
    step_time.program_bound,
    step_time.slower_than_before,
    disks.slow_paths,
    disks.retries,
    disks.rereads,
    disks.worn,
    disks.page_cache,
    memory.exceeded_budgets,
    memory.nearly_full,
    disks.passed_over,
    memory.unused_budgets,
    training.configuration,
)
_SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")


def advise(run: RunView) -> list[Advice]:
    """The advice for ``run``, errors first. Equal advice for several ranks is merged."""
    merged: dict[tuple[str, str, str], Advice] = {}
    for rule in _RULES:
        for advice in rule(run):
            first = merged.setdefault((advice.code, advice.text, advice.remedy), advice)
            first.ranks += [rank for rank in advice.ranks if rank not in first.ranks]
    return sorted(merged.values(), key=lambda advice: _SEVERITIES.index(advice.severity))
