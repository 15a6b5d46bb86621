"""State changes of the runs: a log line for each. The runs that ended are kept."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from service.advice.step_time import stuck
from service.ended_runs import EndedRuns
from service.formatting import counted, joined, plain
from service.health import reasons
from service.responses.status import EndedRun
from service.run_end import end_of, ended, with_last_status
from service.view import Node, RunState, RunView, View

MAX_LINES = 20  # log lines per View: writing to a slow log reader blocks the sidecar

log = logging.getLogger(__name__)


class RunLog:
    """Compares each View with the previous one and logs the changes. It adds runs that ended to ``ended_runs``."""

    def __init__(self, ended_runs: EndedRuns) -> None:
        self.ended_runs = ended_runs
        self._previous: dict[str, RunView] = {}
        self._logged_states: dict[str, RunState] = {}  # by run, the last state in the log
        # Runs that ended, as long as they are in the View: more may end at once than EndedRuns keeps.
        self._logged_ends: set[str] = set()
        self._lost_nodes: set[str] = set()

    @property
    def ended(self) -> list[EndedRun]:
        """Runs that ended and are not in the View any more, the latest first."""
        return self.ended_runs.without(self._previous)

    def add(self, view: View) -> None:
        """Log the changes since the previous View: at most MAX_LINES, and the number of the others."""
        lines = [*self._node_changes(view.nodes or ()), *self._changes(view)]
        for level, line in lines[:MAX_LINES]:
            log.log(level, "%s", plain(line))
        if len(lines) > MAX_LINES:
            log.warning("%s since the last reading", counted(len(lines) - MAX_LINES, "more change"))

    def _node_changes(self, nodes: Sequence[Node]) -> Iterator[tuple[int, str]]:
        """Nodes that do not answer any more, or answer again. A node that has never answered is lost, too."""
        previous, self._lost_nodes = self._lost_nodes, {node.address for node in nodes if node.problem}
        for node in nodes:
            if node.problem and node.address not in previous:
                yield logging.WARNING, f"node {node.address} does not answer: {node.problem}"
            elif not node.problem and node.address in previous:
                yield logging.INFO, f"node {node.address} answers again"

    def _changes(self, view: View) -> Iterator[tuple[int, str]]:
        """Log levels and lines. A new state counts once it lasts for two Views: ranks start and end one by one."""
        previous, self._previous = self._previous, {run.id: run for run in view.runs}
        for run in view.runs:
            if not run.over:
                # A status file that was removed and created again brings its run back.
                self.ended_runs.remove(run.id)
                self._logged_ends.discard(run.id)
            if run.id not in previous:
                # Of a run that ended before the sidecar started, only the end is logged.
                self._logged_states[run.id] = "training" if not run.over else "degraded"
                if not run.over:
                    yield logging.INFO, f"{_label(run)} started: {_ranks(run)}"
            elif run.state == previous[run.id].state != self._logged_states[run.id]:
                self._logged_states[run.id] = run.state
                yield from self._end(run) if run.over else (_change(run),)
        for run_id in previous.keys() - self._previous.keys():
            del self._logged_states[run_id]
            yield from self._end(with_last_status(previous[run_id], view.closed))
        for run in ended(view):
            # Runs that were too short to be in a View before they ended.
            if run.id not in self._previous:
                yield from self._end(run)
        self._logged_ends &= {run.id for run in (*view.runs, *view.closed)}

    def _end(self, run: RunView) -> Iterator[tuple[int, str]]:
        is_logged = run.id in self._logged_ends or run.id in self.ended_runs
        self._logged_ends.add(run.id)
        if is_logged:
            return
        self.ended_runs.add(run)
        end = end_of(run)
        level = logging.INFO if end.how in ("finished", "preempted") else logging.WARNING
        step = max((snapshot.step for snapshot in run.snapshots), default=0)
        yield level, f"{_label(run)} {end.sentence(f' at step {step}')}"


def _change(run: RunView) -> tuple[int, str]:
    if run.state == "degraded":
        return logging.WARNING, f"{_label(run)} is degraded: {'; '.join(_problems(run))}"
    if run.state == "stuck":
        texts = [f"rank {joined(map(str, advice.ranks))}: {advice.text}" for advice in stuck(run)]
        return logging.WARNING, f"{_label(run)} is stuck: {'; '.join(texts)}"
    return logging.INFO, f"{_label(run)} trains again with all its ranks"


def _problems(run: RunView) -> Iterator[str]:
    for snapshot in run.snapshots:
        if snapshot.broken:
            yield f"rank {snapshot.rank} cannot continue: {snapshot.broken}"
    yield from reasons(run)


def _label(run: RunView) -> str:
    return f"run {run.name} ({run.id})"


def _ranks(run: RunView) -> str:
    return f"{len(run.fresh)} of its {counted(run.expected, 'rank')} {run.where}"
