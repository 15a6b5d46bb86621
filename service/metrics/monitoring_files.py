"""What a Prometheus and a Grafana beside the sidecar want, as ``tierd dashboard`` and its like print it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import resources
from typing import Any

from service.metrics.families import Family
from service.metrics.rank_metrics import OF_PLAN, OF_RANK, OF_SNAPSHOT, RANK_UP
from service.metrics.run_metrics import OF_RUN
from service.metrics.sidecar_metrics import OF_SIDECAR

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
    """What one of the files holds."""
    return resources.files("service.metrics").joinpath(file).read_text(encoding="utf-8")


def table() -> str:
    """All metrics in Markdown, by whom they are about."""
    parts: tuple[tuple[str, Sequence[Family[Any]], str], ...] = (
        ("Of a rank", (RANK_UP, *OF_RANK, *OF_SNAPSHOT, *OF_PLAN), "`run`, `rank`"),
        ("Of a run", OF_RUN, "`run`"),
        ("Of the sidecar", OF_SIDECAR, "no labels"),
    )
    return "\n".join(_part(title, families, labels) for title, families, labels in parts)


def _part(title: str, families: Sequence[Family[Any]], labels: str) -> str:
    rows = (
        f"| `{family.name}` | {family.kind} | {', '.join(f'`{label}`' for label in family.labels)} | {family.help} |\n"
        for family in families
    )
    head = "| metric | type | further labels | what it says |\n|---|---|---|---|\n"
    return f"### {title}: {labels}\n\n{head}{''.join(rows)}"
