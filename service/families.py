"""What ``/metrics`` tells: a table of metrics by whom they are about, each with what it reads of a View.

Units are bytes and seconds. What pages have as rates and percentiles is left out: those of several ranks, or of another
window, can be made of counters and buckets, but not of each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from platform import python_version
from typing import Generic, Literal, TypeVar, get_args

from service.advice import advise
from service.version import own_version
from service.view import RankView, RunView, State, View
from tiering.telemetry import Description, PlanStatus

Subject = TypeVar("Subject")


@dataclass(frozen=True)
class Histogram:
    """Of ``count`` observations, which add up to ``sum``, ``below[i]`` were below ``bounds[i]``, a number in words."""

    bounds: Sequence[str]
    below: Sequence[int]
    count: int
    sum: float


Values = Mapping[tuple[str, ...], float | Histogram | None]  # by the values of the labels; None: not known


@dataclass(frozen=True)
class Family(Generic[Subject]):
    """One metric, named as in queries. ``labels`` come after those of the subject: a run, or a run and a rank."""

    kind: Literal["gauge", "counter", "info", "histogram"]
    name: str
    help: str
    labels: tuple[str, ...]
    read: Callable[[Subject], Values]

    @property
    def unit(self) -> str:
        """The one that the name ends in; empty for a plain number."""
        base = self.name.removesuffix("_total")
        return next((unit for unit in ("seconds", "bytes", "ratio") if base.endswith("_" + unit)), "")


def gauge(name: str, text: str, read: Callable[[Subject], float | None]) -> Family[Subject]:
    """One without labels of its own."""
    return Family("gauge", name, text, (), lambda subject: {(): read(subject)})


def counter(name: str, text: str, read: Callable[[Subject], float]) -> Family[Subject]:
    """One without labels of its own."""
    return Family("counter", name, text, (), lambda subject: {(): read(subject)})


@dataclass(frozen=True)
class Sidecar:
    """What it read, and how many listen to its events."""

    view: View
    subscribers: int


def _pages(sidecar: Sidecar) -> Values:
    found = Counter(rank.state for run in sidecar.view.runs for rank in run.ranks)
    return {(state,): found[state] for state in get_args(State)}


OF_SIDECAR: tuple[Family[Sidecar], ...] = (
    Family(
        "info",
        "tiering_build_info",
        "The version of the sidecar, and of the Python that runs it.",
        ("version", "python_version"),
        lambda _: {(own_version(), python_version()): 1},
    ),
    Family(
        "gauge",
        "tiering_sidecar_pages",
        "Telemetry pages in the run directory, by what became of reading them.",
        ("state",),
        _pages,
    ),
    gauge(
        "tiering_sidecar_last_reading_timestamp_seconds",
        "Unix time at which the telemetry pages were last read.",
        lambda sidecar: sidecar.view.taken_at,
    ),
    counter(
        "tiering_sidecar_readings_total",
        "How often the telemetry pages were read; at most four times a second, however many ask.",
        lambda sidecar: sidecar.view.readings,
    ),
    gauge(
        "tiering_sidecar_subscribers",
        "How many listen to /v1/events.",
        lambda sidecar: sidecar.subscribers,
    ),
)


def _description(run: RunView) -> Description:
    return next((rank.description for rank in run.ranks if rank.description is not None), Description())


def _run_info(run: RunView) -> Values:
    versions = _description(run).versions
    world_size = next(run.snapshots).world_size
    packages = (versions.get(name, "") for name in ("tiering", "torch", "python"))
    return {(run.name, str(world_size), *packages): 1}


def _configuration(run: RunView) -> Values:
    said = _description(run).configuration
    if said is None:
        return {}
    return {("deprecated",): len(said.deprecated), ("without effect",): len(said.without_effect)}


OF_RUN: tuple[Family[RunView], ...] = (
    Family(
        "info",
        "tiering_run_info",
        "A run on this node: its name, how many ranks it has on all nodes, and the versions it runs.",
        ("name", "world_size", "version", "torch_version", "python_version"),
        _run_info,
    ),
    gauge(
        "tiering_run_ranks_expected",
        "Ranks of the run that should be on this node, as they say themselves.",
        lambda run: run.expected,
    ),
    gauge(
        "tiering_run_ranks_up",
        "Ranks of the run on this node that live, can be read and have just published.",
        lambda run: len(run.fresh),
    ),
    Family(
        "gauge",
        "tiering_run_warnings",
        "Warnings about the run; /v1/status has their words and remedies.",
        ("code", "severity"),
        lambda run: dict(Counter((one.code, one.severity) for one in advise(run))),
    ),
    Family(
        "gauge",
        "tiering_run_config_keys",
        "Keys of the run's configuration file that deserve a look, by why they do.",
        ("cause",),
        _configuration,
    ),
)


def _rank_info(rank: RankView) -> Values:
    said, engine = rank.snapshot, rank.snapshot.io_engine if rank.snapshot is not None else None
    if said is None:
        return {}
    device = rank.description.device if rank.description is not None else ""
    name, flags = (engine.name, ",".join(sorted(engine.flags))) if engine is not None else ("", "")
    return {(said.node, str(said.local_rank), device, name, flags): 1}


# Of ranks that live; their process may hang, which is what the age is for.
OF_RANK: tuple[Family[RankView], ...] = (
    # An age, though moments are more common: the clock of whoever asks need not be this node's.
    gauge(
        "tiering_rank_heartbeat_age_seconds",
        "Seconds since the rank last published, which it does four times a second.",
        lambda rank: rank.heartbeat_age,
    ),
    Family(
        "info",
        "tiering_rank_info",
        "Where the rank runs, on what it computes, and the I/O engine that swaps for it.",
        ("node", "local_rank", "device", "io_engine", "io_flags"),
        _rank_info,
    ),
)


OF_PLAN: tuple[Family[PlanStatus], ...] = (
    Family(
        "gauge",
        "tiering_plan_tier_bytes",
        "Bytes that the plan puts on the tier, by what they hold.",
        ("tier", "kind"),
        lambda plan: {
            (tier.name, kind): nbytes for tier in plan.tiers for kind, nbytes in tier.by_kind.items()
        },
    ),
    Family(
        "gauge",
        "tiering_plan_step_bytes",
        "Bytes that a step moves by the plan, by what they hold: read and written over NVMe, sent to other ranks.",
        ("direction", "kind"),
        lambda plan: {
            (direction, kind): nbytes
            for direction, moved in (("read", plan.read), ("write", plan.written), ("send", plan.sent))
            for kind, nbytes in moved.items()
        },
    ),
)

RANK_UP: Family[RankView] = gauge(
    "tiering_rank_up",
    "Whether the rank's process lives and its page can be read (1), or not (0).",
    lambda rank: float(rank.state in ("live", "silent")),
)
