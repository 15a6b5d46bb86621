"""``python -m service.monitoring WHAT``: print one of the files that come with the sidecar, or the table of metrics."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import resources
from typing import Any

from service.families import OF_PLAN, OF_RANK, OF_RUN, OF_SIDECAR, RANK_UP, Family
from service.snapshot_families import OF_SNAPSHOT

FILES = {
    "dashboard": "tierd-dashboard.json",
    "alerts": "tierd-alerts.yaml",
    "alerts-test": "tierd-alerts-test.yaml",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m service.monitoring", description=__doc__)
    parser.add_argument(
        "what",
        choices=[*FILES, "metrics"],
        help="a dashboard for Grafana, alert rules for Prometheus, the tests of these for promtool,"
        " or a table of all metrics in Markdown",
    )
    what = parser.parse_args(arguments).what
    sys.stdout.write(table() if what == "metrics" else text(FILES[what]))
    return 0


def text(file: str) -> str:
    """What one of the files holds."""
    return resources.files("service.monitoring").joinpath(file).read_text(encoding="utf-8")


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


if __name__ == "__main__":
    sys.exit(main())
