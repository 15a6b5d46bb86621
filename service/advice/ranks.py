"""Ranks that cannot be seen, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from service.advice.advice import Advice, error, warning
from service.view import RunView
from service.words import seconds

_LAST_WORDS = "its last words are in the log of the job, those of the out-of-memory killer in `dmesg`"

_OF_STATE: dict[str, tuple[Callable[..., Advice], str, str]] = {
    "silent": (
        error,
        "rank {rank} lives, but has not published for {age}",
        "it is stopped, or gets no CPU: look at process {pid}; `kill -CONT {pid}` goes on with a stopped one",
    ),
    "stale": (
        error,
        "rank {rank} is dead: {reason}",
        _LAST_WORDS + "; the others cannot go on without it: start the job again from its last checkpoint",
    ),
    "newer-version": (
        warning,
        "rank {rank} cannot be shown: {reason}",
        "end this tierd, and start the one of the version of tiering that the run uses",
    ),
    "torn": (
        warning,
        "rank {rank} cannot be shown at the moment: {reason}",
        "wait a second; if it stays so, the disk of the run directory does not keep up",
    ),
    "unreadable": (
        error,
        "the page of rank {rank} cannot be read: {reason}",
        "only its engine should write to the run directory; the run goes on, and its next start makes a new page",
    ),
}


def states(run: RunView) -> Iterator[Advice]:
    """Ranks that died, are silent, cannot be read or are not there."""
    if run.ranks and run.over:
        step = max((max(said.step, said.global_step) for said in run.snapshots), default=0)
        text = f"the run has ended after step {step} without closing its pages: it was killed, or crashed"
        yield error("run-ended", text, _LAST_WORDS)
        return
    for rank in run.ranks:
        if rank.state in _OF_STATE and rank.rank not in run.fresh:
            of, text, remedy = _OF_STATE[rank.state]
            told = {
                "rank": rank.rank,
                "reason": rank.reason,
                "age": seconds(rank.heartbeat_age or 0.0),
                "pid": rank.snapshot.pid if rank.snapshot is not None else "PID",
            }
            yield of(f"rank-{rank.state}", text.format(**told), remedy.format(**told), rank.rank)
    if run.missing:
        yield error(
            "rank-missing",
            f"{run.missing} of the {run.expected} ranks on this node have no page",
            "they have not started yet or have ended, run as another user or with another TIERING_RUN_DIR, or have"
            " tiering.telemetry.enabled false: look at the log of the job",
        )
