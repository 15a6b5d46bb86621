"""Ranks that cannot be seen, and ranks that others wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

from service.advice.finding import Advice, error, warning
from service.advice.stalls import (
    ON_RANKS,
    STALLED,
    Stepping,
    busy,
    on_link,
    on_nvme,
    outside,
    stepping,
    typical,
)
from service.formatting import counted, seconds, share
from service.run_end import end_of
from service.view import RunView

_LAST_WORDS = "the log of the job has the traceback, and `dmesg` what the out-of-memory killer did"

_OF_STATE: dict[str, tuple[Callable[..., Advice], str, str]] = {
    "silent": (
        error,
        "rank {rank} lives, but has not published for {age}",
        "it is stopped, or gets no CPU: look at process {pid}; `kill -CONT {pid}` goes on with a stopped one",
    ),
    "stale": (
        error,
        "rank {rank} is stale: {reason}",
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
        "wait a second; if it stays so, its process was stopped while it wrote: `kill -CONT` its pid",
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
        end = end_of(run)
        if end.how == "failed":
            yield error("run-ended", f"the run {end.words(f' after step {step}')}", _LAST_WORDS)
        elif end.how == "died":
            text = f"the run has ended after step {step} without closing its pages: it was killed"
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
        verb = "has" if run.missing == 1 else "have"
        yield error(
            "rank-missing",
            f"{run.missing} of the {counted(run.expected, 'rank')} on this node {verb} no page",
            "they have not started yet or have ended, run as another user or with another TIERING_RUN_DIR, or have"
            " tiering.telemetry.enabled false: look at the log of the job",
        )


_SENDING = "all ranks are on this node, and take this time to send each other what they compute"
STRAGGLES = 1.25  # times as busy as the others: the spread of equal ranks that share a machine stays below


def waited_for(run: RunView) -> Iterator[Advice]:
    """A rank that all wait for, or else the network between them."""
    told = stepping(run)
    if len(told) > 1:
        slowest = max(told, key=lambda one: typical(one, busy))
        others = [one for one in told if one is not slowest]
        if typical(slowest, busy) >= STRAGGLES * median(typical(one, busy) for one in others) > 0:
            yield _straggler(slowest, others)
            return
    found = [one for one in told if one.waited.on(ON_RANKS) >= STALLED]
    if found:
        most = max(one.waited.on(ON_RANKS) for one in found)
        elsewhere = any(one.said.world_size > one.said.local_world_size for one in found)
        yield warning(
            "network-bound",
            f"{share(most)} of the step is waiting for other ranks, and no rank of this node is a straggler",
            ("look on the other nodes for a slower rank; else it is the network" if elsewhere else _SENDING)
            + ": a larger micro-batch or, below stage 3, more gradient_accumulation_steps send less for each sample",
            *[one.rank.rank for one in found],
        )


def _straggler(slowest: Stepping, others: list[Stepping]) -> Advice:
    took, usual = typical(slowest, busy), median(typical(one, busy) for one in others)
    rank = slowest.rank.rank
    text = f"rank {rank} is busy for {seconds(took)} of each step, the others for {seconds(usual)}: they wait for it"
    for part, told, remedy in (
        (
            on_nvme,
            "stall for NVMe",
            "look at what else uses its disk, and compare the ranks' disks with `tierbench DIR`",
        ),
        (
            on_link,
            "stall for copies",
            "compare the ranks' links (`nvidia-smi -q -d PCIE`), and look at what else copies over its own",
        ),
        (
            outside,
            "neither forward nor backward nor step",
            "look at what its program does there: its data, its logging",
        ),
    ):
        more, usually = typical(slowest, part), median(typical(one, part) for one in others)
        if more - usually >= (took - usual) / 2:
            text += f"; {seconds(more)} of it is {told}, {seconds(usually)} of theirs"
            return warning("straggler", text, remedy, rank)
    remedy = "look at what else runs on its cores or GPU, at their clock and temperature, and at its share of the data"
    return warning("straggler", text, remedy, rank)
