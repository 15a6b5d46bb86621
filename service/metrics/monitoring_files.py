"""Files for Prometheus and Grafana: ``tierd dashboard``, ``alerts``, ``alerts-test`` and ``metrics`` print them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import resources
from typing import Any

from service.metrics.families import Family
from service.metrics.rank_metrics import PLAN_METRICS, RANK_METRICS, RANK_UP, SNAPSHOT_METRICS
from service.metrics.run_metrics import RUN_ENDED, RUN_METRICS
from service.metrics.sidecar_metrics import SIDECAR_METRICS

FILES = {
    "dashboard": "tierd-dashboard.json",
    "alerts": "tierd-alerts.yaml",
    "alerts-test": "tierd-alerts-test.yaml",
}


def main(name: str) -> int:
    """Print one of FILES, or the table of metrics."""
    sys.stdout.write(table() if name == "metrics" else text(FILES[name]))
    return 0


def text(file: str) -> str:
    """The content of one of the files."""
    return resources.files("service.metrics").joinpath(file).read_text(encoding="utf-8")


def table() -> str:
    """A table of all metrics in Markdown, by subject."""
    parts: tuple[tuple[str, Sequence[Family[Any]], str], ...] = (
        ("Metrics of a rank", (RANK_UP, *RANK_METRICS, *SNAPSHOT_METRICS, *PLAN_METRICS), "`run`, `rank`"),
        ("Metrics of a run", (*RUN_METRICS, RUN_ENDED), "`run`"),
        ("Metrics of the sidecar", SIDECAR_METRICS, "no labels"),
    )
    return "\n".join(_part(title, families, labels) for title, families, labels in parts)


def _part(title: str, families: Sequence[Family[Any]], labels: str) -> str:
    rows = (
        f"| `{family.name}` | {family.kind} | {', '.join(f'`{label}`' for label in family.labels)} | {family.help} |\n"
        for family in families
    )
    head = "| metric | type | further labels | meaning |\n|---|---|---|---|\n"
    return f"### {title}: {labels}\n\n{head}{''.join(rows)}"
