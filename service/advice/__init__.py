"""What deserves an operator's attention, in plain words, each with its remedy. Pure: a RunView in, words out.

    advice.py   what is said               ranks.py      who is not there, who is slower than the others
    waits.py    what steps wait for        waiting.py    what bounds the step, and what would help
    relief.py   what memory would do       disks.py  memory.py  training.py

Each rule looks at a run and yields what it finds; a threshold stands beside its reason. Figures are of recent steps
where there are enough of them, and of the whole run for counters of what should never happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from service.advice import disks, memory, ranks, training, waiting
from service.advice.advice import Advice, Severity
from service.view import RunView

__all__ = ["Advice", "Severity", "advise"]

_RULES: tuple[Callable[[RunView], Iterator[Advice]], ...] = (
    ranks.states,
    disks.errors,
    training.broken,
    training.diverged,
    training.failed_saves,
    training.skipping,
    waiting.stuck,
    waiting.for_nvme,
    waiting.for_other_ranks,
    waiting.for_the_program,
    waiting.longer_than_before,
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
