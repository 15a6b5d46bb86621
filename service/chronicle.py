"""What became of the runs: a line in the log for each change, and the last words of those that have ended."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator

from service.answers.status import EndedRun, last_words
from service.health import reasons
from service.view import RunState, RunView, View
from service.words import plain

MOST = 10  # ended runs that are remembered

log = logging.getLogger(__name__)


class Chronicle:
    """Told a View every second. Who comes back after lunch finds here what was swept meanwhile."""

    def __init__(self) -> None:
        self._before: dict[str, RunView] = {}
        self._said: dict[str, RunState] = {}  # the state that the log has a run in
        self._ended: deque[EndedRun] = deque(maxlen=MOST)

    @property
    def ended(self) -> list[EndedRun]:
        """Runs without a page, the latest first."""
        return list(reversed(self._ended))

    def add(self, view: View) -> None:
        """Compare with the View before. Of a state the log is told when it lasts: ranks come and go one by one."""
        before, self._before = self._before, {run.id: run for run in view.runs}
        for one in [
            one for one in self._ended if one.id in self._before
        ]:  # its page was removed, and made anew
            self._ended.remove(one)
        for run in view.runs:
            if run.id not in before:
                self._said[run.id] = "training"
                log.info(
                    "%s is here: %d of its %d ranks on this node", _named(run), len(run.fresh), run.expected
                )
            elif run.state == before[run.id].state != self._said[run.id]:
                self._said[run.id] = run.state
                _tell(run)
        for run_id in before.keys() - self._before.keys():
            words = last_words(before[run_id])
            self._ended.append(words)
            if self._said.pop(run_id) != "ended":  # else that was told when its last process went
                log.info("%s has %s at step %s", _named(before[run_id]), words.how, words.step)


def _tell(run: RunView) -> None:
    if run.state == "degraded":
        log.warning("%s is degraded: %s", _named(run), plain("; ".join(_wrong(run))))
    elif run.state == "ended":
        log.warning("%s has died: %s", _named(run), plain("; ".join(reasons(run))))
    else:
        log.info("%s trains again with all its ranks", _named(run))


def _wrong(run: RunView) -> Iterator[str]:
    yield from (f"rank {said.rank} cannot go on: {said.broken}" for said in run.snapshots if said.broken)
    yield from reasons(run)


def _named(run: RunView) -> str:
    return plain(f"run {run.name} ({run.id})")
