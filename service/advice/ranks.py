"""Ranks that are missing, silent or dead, and stragglers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

from service.advice.advice import Advice, error, warning
from service.advice.stalls import (
    ON_RANKS,
    STALL_FRACTION,
    SteppingRank,
    busy,
    on_link,
    on_nvme,
    outside,
    stepping_ranks,
    typical,
)
from service.formatting import counted, seconds, share
from service.run_end import end_of
from service.view import RunView

_LOG_REMEDY = "see the log of the job for the traceback, and `dmesg` for the out-of-memory killer"

_BY_STATE: dict[str, tuple[Callable[..., Advice], str, str]] = {
    "silent": (
        error,
        "rank {rank} is alive but has not published for {age}",
        "its process {pid} is stopped or gets no CPU time; `kill -CONT {pid}` continues a stopped process",
    ),
    "stale": (
        error,
        "rank {rank} is stale: {reason}",
        _LOG_REMEDY
        + "; the other ranks cannot continue without it: restart the job from its last checkpoint",
    ),
    "unreachable": (
        error,
        "node {reason}; its ranks may train, but cannot be seen",
        "check the node, the network, and tierd on the node",
    ),
    "newer-version": (
        warning,
        "rank {rank} cannot be shown: {reason}",
        "stop this tierd, and start the tierd of the tiering version that the run uses",
    ),
    "torn": (
        warning,
        "rank {rank} cannot be shown at the moment: {reason}",
        "wait a second; if this persists, the process was stopped during a write: run `kill -CONT` with its pid",
    ),
    "unreadable": (
        error,
        "the status file of rank {rank} cannot be read: {reason}",
        "only the engine should write to the run directory; the run continues; its next start creates a new file",
    ),
}


def states(run: RunView) -> Iterator[Advice]:
    """Ranks that died, are silent, cannot be read or are missing."""
    if run.ranks and run.over:
        step = max((max(snapshot.step, snapshot.global_step) for snapshot in run.snapshots), default=0)
        end = end_of(run)
        if end.how == "failed":
            yield error("run-ended", f"the run {end.sentence(f' after step {step}')}", _LOG_REMEDY)
        elif end.how == "died":
            text = f"the run ended after step {step} without closing its status files: it was killed"
            yield error("run-ended", text, _LOG_REMEDY)
        return
    for rank in run.ranks:
        if rank.state in _BY_STATE and rank.rank not in run.fresh:
            advice, text, remedy = _BY_STATE[rank.state]
            figures = {
                "rank": rank.rank,
                "reason": rank.reason,
                "age": seconds(rank.heartbeat_age or 0.0),
                "pid": rank.snapshot.pid if rank.snapshot is not None else "PID",
            }
            yield advice(f"rank-{rank.state}", text.format(**figures), remedy.format(**figures), rank.rank)
    if run.missing:
        verb = "has" if run.missing == 1 else "have"
        yield error(
            "rank-missing",
            f"{run.missing} of the {counted(run.expected, 'rank')} {run.where} {verb} no status file",
            "they have not started or have ended, run as another user or with another TIERING_RUN_DIR, or have"
            " tiering.telemetry.enabled false: see the log of the job",
        )


_ONE_NODE = "all ranks are on this node; this is the time of their collectives"
STRAGGLER_RATIO = 1.25  # times as busy as the other ranks: equal ranks that share a machine differ by less


def stragglers_or_network(run: RunView) -> Iterator[Advice]:
    """A rank that the others wait for; without one, ranks that wait for the network."""
    ranks = stepping_ranks(run)
    if slow := _slow(ranks):
        yield _straggler(slow[0], [rank for rank in ranks if rank is not slow[0]])
        return
    stalled = [rank for rank in ranks if rank.steps.stalled_on(ON_RANKS) >= STALL_FRACTION]
    if stalled:
        longest = max(rank.steps.stalled_on(ON_RANKS) for rank in stalled)
        group = "the run" if run.on_all_nodes else "this node"
        several_nodes = any(rank.snapshot.world_size > rank.snapshot.local_world_size for rank in stalled)
        yield warning(
            "network-bound",
            f"{share(longest)} of the step is stall for other ranks, and no rank of {group} is a straggler",
            (
                _ONE_NODE
                if not several_nodes
                else "the network is slow"
                if run.on_all_nodes
                else "check the other nodes for a slower rank; otherwise the network is slow"
            )
            + ": a larger micro-batch or, below stage 3, more gradient_accumulation_steps send less for each sample",
            *[rank.rank.rank for rank in stalled],
        )


def stragglers(run: RunView) -> set[int]:
    """The ranks that the others wait for."""
    return {rank.rank.rank for rank in _slow(stepping_ranks(run))}


def _slow(ranks: list[SteppingRank]) -> list[SteppingRank]:
    """The stragglers among ``ranks``, the slowest first: busy for longer than the others without the slowest rank."""
    by_busy = sorted(((typical(rank, busy), rank) for rank in ranks), key=lambda pair: -pair[0])
    usual = median(seconds for seconds, _ in by_busy[1:]) if len(by_busy) > 1 else 0.0
    return [rank for seconds, rank in by_busy if seconds >= STRAGGLER_RATIO * usual > 0]


def _straggler(slowest: SteppingRank, others: list[SteppingRank]) -> Advice:
    busy_seconds, usual = typical(slowest, busy), median(typical(rank, busy) for rank in others)
    rank = slowest.rank.rank
    text = (
        f"rank {rank} is busy for {seconds(busy_seconds)} of each step, the other ranks for {seconds(usual)}:"
        " they wait for it"
    )
    for part, noun, remedy in (
        (
            on_nvme,
            "stall for NVMe",
            "check what else uses its disk, and compare the disks of the ranks with `tierbench DIR`",
        ),
        (
            on_link,
            "stall for copies",
            "compare the links of the ranks (`nvidia-smi -q -d PCIE`), and check what else copies over this link",
        ),
        (
            outside,
            "outside forward, backward and step",
            "check what its program does there, for example data loading or logging",
        ),
    ):
        part_seconds, usual_part = typical(slowest, part), median(typical(rank, part) for rank in others)
        if part_seconds - usual_part >= (busy_seconds - usual) / 2:
            text += f"; {seconds(part_seconds)} of this is {noun}, {seconds(usual_part)} for the other ranks"
            return warning("straggler", text, remedy, rank)
    remedy = (
        "check what else runs on its cores or GPU, their clock and temperature, and the size of its batches"
    )
    return warning("straggler", text, remedy, rank)
