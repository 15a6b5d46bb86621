"""What deserves an operator's attention, in plain words, each with its remedy. Pure: a RunView in, words out.

    finding.py   what is said            ranks.py   who is not there, and whom the others wait for
    waits.py     what steps wait for     nvme.py    steps that wait for NVMe, and what would help
    relief.py    what memory would do    link.py    steps that wait for copies to a GPU or from it
                                         pace.py    steps that do not come, or have become slower
                                         disks.py  memory.py  training.py

Each rule looks at a run and yields what it finds; a threshold stands beside its reason. Figures are of recent steps
where there are enough of them, and of the whole run for counters of what should never happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from service.advice import disks, link, memory, nvme, pace, ranks, training
from service.advice.finding import Advice, Severity
from service.view import RunView

__all__ = ["Advice", "Severity", "advise"]

_RULES: tuple[Callable[[RunView], Iterator[Advice]], ...] = (
    ranks.states,
    disks.errors,
    training.broken,
    training.diverged,
    training.failed_saves,
    training.skipping,
    pace.stuck,
    nvme.bound,
    link.bound,
    ranks.waited_for,
    pace.of_the_update,
    pace.of_the_program,
    pace.slower_than_before,
    disks.slow_paths,
    disks.retries,
    disks.page_cache,
    memory.exceeded_budgets,
    memory.nearly_full,
    disks.passed_over,
    memory.unused_budgets,
    training.configuration,
)
_GRAVEST_FIRST: tuple[Severity, ...] = ("error", "warning", "info")


def advise(run: RunView) -> list[Advice]:
    """Warnings about ``run``, the gravest first. What several ranks say in the same words is said once."""
    said: dict[tuple[str, str, str], Advice] = {}
    for rule in _RULES:
        for found in rule(run):
            first = said.setdefault((found.code, found.text, found.remedy), found)
            first.ranks += [rank for rank in found.ranks if rank not in first.ranks]
    return sorted(said.values(), key=lambda one: _GRAVEST_FIRST.index(one.severity))
