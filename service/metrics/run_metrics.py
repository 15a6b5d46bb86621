"""Metrics of a run: its ranks on this node, and its warnings."""

from __future__ import annotations

from collections import Counter

from service.advice import advise
from service.metrics.families import Family, Values, gauge
from service.run_end import end_of
from service.view import RunView
from tiering.telemetry import Description


def _description(run: RunView) -> Description:
    return next((rank.description for rank in run.ranks if rank.description is not None), Description())


def _run_info(run: RunView) -> Values:
    snapshot = next(run.snapshots, None)
    if snapshot is None:
        return {}
    description = _description(run)
    packages = (description.versions.get(name, "") for name in ("tiering", "torch", "python"))
    return {(run.name, run.user, str(snapshot.world_size), *packages): description.labels}


def _configuration(run: RunView) -> Values:
    configuration = _description(run).configuration
    if configuration is None:
        return {}
    return {
        ("deprecated",): len(configuration.deprecated),
        ("without effect",): len(configuration.without_effect),
    }


def _end(run: RunView) -> Values:
    end = end_of(run)
    return {(end.how, end.code, "" if end.rank is None else str(end.rank)): 1}


RUN_ENDED: Family[RunView] = Family(
    "gauge",
    "tiering_run_ended",
    "1 for a minute after all ranks of the run on this node have ended: how, the code of the error or the signal, and"
    " the rank in which the error started.",
    ("how", "code", "rank"),
    _end,
)


RUN_METRICS: tuple[Family[RunView], ...] = (
    Family(
        "info",
        "tiering_run_info",
        "A run on this node: its name and user, its number of ranks on all nodes, its software versions, its labels:"
        " job_id, job_name, namespace, pod, and those of the configuration.",
        ("name", "user", "world_size", "version", "torch_version", "python_version"),
        _run_info,
    ),
    gauge(
        "tiering_run_ranks_expected",
        "Number of ranks of the run on this node, as they report it.",
        lambda run: run.expected,
    ),
    gauge(
        "tiering_run_ranks_up",
        "Number of ranks of the run on this node that are live, readable and have just published.",
        lambda run: len(run.fresh),
    ),
    Family(
        "gauge",
        "tiering_run_warnings",
        "Warnings about the run; /v1/status has their texts and remedies.",
        ("code", "severity"),
        lambda run: dict(Counter((advice.code, advice.severity) for advice in advise(run))),
    ),
    Family(
        "gauge",
        "tiering_run_config_keys",
        "Keys of the run's configuration file to check: deprecated, or without effect.",
        ("cause",),
        _configuration,
    ),
)
