"""State changes of the runs: a log line for each, and a summary of each run that ended."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator

from service.formatting import counted, plain
from service.health import reasons
from service.responses.status import EndedRun, ended_run
from service.run_end import end_of, with_last_status
from service.view import RunState, RunView, View

MAX_ENDED = 10  # ended runs to remember
MAX_LINES = 20  # log lines per View: writing to a slow log reader blocks the sidecar

log = logging.getLogger(__name__)


class RunLog:
    """Compares each View with the previous one and logs the changes. It also remembers the last ended runs."""

    def __init__(self) -> None:
        self._previous: dict[str, RunView] = {}
        self._logged_states: dict[str, RunState] = {}  # by run, the last state in the log
        # Runs that have only closed status files, and whose end is in the log.
        self._closed: set[str] = set()
        self._ended: deque[EndedRun] = deque(maxlen=MAX_ENDED)

    @property
    def ended(self) -> list[EndedRun]:
        """Runs that ended and have no status file any more, the latest first."""
        return list(reversed(self._ended))

    def add(self, view: View) -> None:
        """Log the changes since the previous View: at most MAX_LINES, and the number of the others."""
        lines = list(self._changes(view))
        for level, line in lines[:MAX_LINES]:
            log.log(level, "%s", plain(line))
        if len(lines) > MAX_LINES:
            log.warning("%s since the last reading", counted(len(lines) - MAX_LINES, "more change"))

    def _changes(self, view: View) -> Iterator[tuple[int, str]]:
        """Log levels and lines. A new state counts once it lasts for two Views: ranks start and end one by one."""
        previous, self._previous = self._previous, {run.id: run for run in view.runs}
        # A status file that was removed and created again brings its run back.
        self._ended = deque((run for run in self._ended if run.id not in self._previous), maxlen=MAX_ENDED)
        for run in view.runs:
            if run.id not in previous:
                self._logged_states[run.id] = "training"
                ranks = f"{len(run.fresh)} of its {counted(run.expected, 'rank')} on this node"
                yield logging.INFO, f"{_label(run)} started: {ranks}"
            elif run.state == previous[run.id].state != self._logged_states[run.id]:
                self._logged_states[run.id] = run.state
                yield _change(run)
        for run_id in previous.keys() - self._previous.keys():
            run = with_last_status(previous[run_id], view.closed)
            self._ended.append(ended_run(run))
            # A run in the state "ended" was logged when its last process ended.
            if self._logged_states.pop(run_id) != "ended":
                yield _end(run)
        closed = {run.id: run for run in view.closed if run.id not in self._previous}
        # Runs that were too short to be in a View before they ended.
        for run_id in closed.keys() - self._closed - previous.keys():
            self._ended.append(ended_run(closed[run_id]))
            yield _end(closed[run_id])
        self._closed = set(closed)


def _change(run: RunView) -> tuple[int, str]:
    if run.state == "degraded":
        return logging.WARNING, f"{_label(run)} is degraded: {'; '.join(_problems(run))}"
    if run.state == "ended":
        return _end(run)
    return logging.INFO, f"{_label(run)} trains again with all its ranks"


def _end(run: RunView) -> tuple[int, str]:
    end = end_of(run)
    level = logging.INFO if end.how in ("finished", "preempted") else logging.WARNING
    step = max((snapshot.step for snapshot in run.snapshots), default=0)
    return level, f"{_label(run)} {end.sentence(f' at step {step}')}"


def _problems(run: RunView) -> Iterator[str]:
    for snapshot in run.snapshots:
        if snapshot.broken:
            yield f"rank {snapshot.rank} cannot continue: {snapshot.broken}"
    yield from reasons(run)


def _label(run: RunView) -> str:
    return f"run {run.name} ({run.id})"
