"""docs/guide/migrate-from-deepspeed.md is what the code does: its imports, its names and its tables."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from docs.generate import unsupported_page
from docs.generate.keys_page import HEADING, section
from tiering._placeholders import Unsupported
from zero3.deepspeed.engine import DeepSpeedEngine

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "guide" / "migrate-from-deepspeed.md").read_text(encoding="utf-8")


def test_the_table_is_what_the_code_makes() -> None:
    assert PAGE.partition(HEADING)[2] == section().partition(HEADING)[2]
    assert unsupported_page.section() in PAGE


def test_the_names_are_there() -> None:
    table, _, absent = (
        PAGE.partition("## Names")[2].partition("## Every key")[0].partition("### Unsupported names")
    )
    names = re.findall(r"`(deepspeed|engine)\.([\w.]+)(?:\(.*?\))?`", table)
    assert len(names) > 35
    for owner, path in names:
        if owner == "deepspeed":
            assert not isinstance(_named(path), Unsupported), path
        # The module's, and an attribute of the instance.
        elif path not in ("parameters", "generate", "config", "settings"):
            assert hasattr(DeepSpeedEngine, path), path
    lines = "".join(row.split("|")[1] for row in absent.splitlines() if row.startswith("| `"))
    methods = re.findall(r"`engine\.(\w+)", lines)
    assert len(methods) > 2 and not any(hasattr(DeepSpeedEngine, name) for name in methods)


def _named(path: str) -> object:
    """The name at ``path`` below the package, as a script gets it: modules are imported first."""
    module, _, name = f"tiering.{path}".rpartition(".")
    return getattr(importlib.import_module(module), name)
