"""What became of the runs: a line in the log for each change, and the last words of those that have ended."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator

from service.formatting import counted, plain
from service.health import reasons
from service.responses.status import EndedRun, last_words
from service.run_end import end_of, with_last_pages
from service.view import RunState, RunView, View

MOST = 10  # ended runs that are remembered
MOST_LINES = 20  # per View: whoever reads the log may be slow, and the sidecar waits for it

log = logging.getLogger(__name__)


class Chronicle:
    """Told a View every second. Who comes back after lunch finds here what was swept meanwhile."""

    def __init__(self) -> None:
        self._before: dict[str, RunView] = {}
        self._said: dict[str, RunState] = {}  # the state that the log has a run in
        self._left: set[str] = set()  # runs of which nothing but last pages is here, and that were told
        self._ended: deque[EndedRun] = deque(maxlen=MOST)

    @property
    def ended(self) -> list[EndedRun]:
        """Runs without a page, the latest first."""
        return list(reversed(self._ended))

    def add(self, view: View) -> None:
        """Compare with the View before, and tell the log, a lot of changes in short."""
        lines = list(self._changes(view))
        for level, line in lines[:MOST_LINES]:
            log.log(level, "%s", plain(line))
        if len(lines) > MOST_LINES:
            log.warning("%s at the same time", counted(len(lines) - MOST_LINES, "more change"))

    def _changes(self, view: View) -> Iterator[tuple[int, str]]:
        """Of a state it is told when it lasts: ranks come and go one by one."""
        before, self._before = self._before, {run.id: run for run in view.runs}
        back = [one for one in self._ended if one.id in self._before]  # a page was removed, and made anew
        for one in back:
            self._ended.remove(one)
        for run in view.runs:
            if run.id not in before:
                self._said[run.id] = "training"
                here = f"{len(run.fresh)} of its {counted(run.expected, 'rank')} on this node"
                yield logging.INFO, f"{_named(run)} is here: {here}"
            elif run.state == before[run.id].state != self._said[run.id]:
                self._said[run.id] = run.state
                yield _change(run)
        for run_id in before.keys() - self._before.keys():
            run = with_last_pages(before[run_id], view.left)
            self._ended.append(last_words(run))
            if self._said.pop(run_id) != "ended":  # else that was told when its last process went
                yield _end(run)
        left = {run.id: run for run in view.left if run.id not in self._before}
        for run_id in left.keys() - self._left - before.keys():  # too short to be seen before
            self._ended.append(last_words(left[run_id]))
            yield _end(left[run_id])
        self._left = set(left)


def _change(run: RunView) -> tuple[int, str]:
    if run.state == "degraded":
        return logging.WARNING, f"{_named(run)} is degraded: {'; '.join(_wrong(run))}"
    if run.state == "ended":
        return _end(run)
    return logging.INFO, f"{_named(run)} trains again with all its ranks"


def _end(run: RunView) -> tuple[int, str]:
    end = end_of(run)
    level = logging.INFO if end.how in ("finished", "preempted") else logging.WARNING
    step = max((said.step for said in run.snapshots), default=0)
    return level, f"{_named(run)} {end.words(f' at step {step}')}"


def _wrong(run: RunView) -> Iterator[str]:
    yield from (f"rank {said.rank} cannot go on: {said.broken}" for said in run.snapshots if said.broken)
    yield from reasons(run)


def _named(run: RunView) -> str:
    return f"run {run.name} ({run.id})"
