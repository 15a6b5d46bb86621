"""Metrics of a run: who belongs to it here, and what deserves attention."""

from __future__ import annotations

from collections import Counter

from service.advice import advise
from service.metrics.families import Family, Values, gauge
from service.view import RunView
from tiering.telemetry import Description


def _description(run: RunView) -> Description:
    return next((rank.description for rank in run.ranks if rank.description is not None), Description())


def _run_info(run: RunView) -> Values:
    said = next(run.snapshots, None)
    if said is None:
        return {}
    versions = _description(run).versions
    packages = (versions.get(name, "") for name in ("tiering", "torch", "python"))
    return {(run.name, str(said.world_size), *packages): 1}


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
