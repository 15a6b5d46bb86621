"""Metrics of a run: its ranks on this node, and its warnings."""

from __future__ import annotations

from collections import Counter

from service.advice import advise
from service.metrics.families import Family, Values, gauge
from service.view import RunView
from tiering.telemetry import Description


def _description(run: RunView) -> Description:
    return next((rank.description for rank in run.ranks if rank.description is not None), Description())


def _run_info(run: RunView) -> Values:
    snapshot = next(run.snapshots, None)
    if snapshot is None:
        return {}
    versions = _description(run).versions
    packages = (versions.get(name, "") for name in ("tiering", "torch", "python"))
    return {(run.name, str(snapshot.world_size), *packages): 1}


def _configuration(run: RunView) -> Values:
    configuration = _description(run).configuration
    if configuration is None:
        return {}
    return {
        ("deprecated",): len(configuration.deprecated),
        ("without effect",): len(configuration.without_effect),
    }


RUN_METRICS: tuple[Family[RunView], ...] = (
    Family(
        "info",
        "tiering_run_info",
        "A run on this node: its name, its number of ranks on all nodes, and its software versions.",
        ("name", "world_size", "version", "torch_version", "python_version"),
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
