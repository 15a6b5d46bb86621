"""docs/guide/migrate-from-deepspeed.md is what the code does: its imports, its names and its tables."""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path

import pytest

import tiering
from docs.generate import unsupported_page
from docs.generate.keys_page import HEADING, section
from tiering._placeholders import Unsupported
from zero3.deepspeed.engine import DeepSpeedEngine

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "guide" / "migrate-from-deepspeed.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_table_is_what_the_code_makes() -> None:
    assert PAGE.partition(HEADING)[2] == section().partition(HEADING)[2]
    assert unsupported_page.section() in PAGE


def change_imports(script: Path, lines: list[str]) -> str:
    """``script`` with the page's command run over these lines."""
    (command,) = [text.removeprefix("$ ") for kind, text in BLOCKS if text.startswith("$ sed ")]
    script.write_text("\n".join(lines), encoding="utf-8", newline="")
    subprocess.run(command, shell=True, check=True, cwd=script.parent)
    with script.open(encoding="utf-8", newline="") as changed:
        return changed.read()


def test_imports_change_as_the_page_says(tmp_path: Path) -> None:
    lines = ["import deepspeed", "import deepspeed.comm as dist", "from deepspeed.ops.adam import FusedAdam"]
    lines += [
        "if True:",
        "    from deepspeed import zero",
        "    import deepspeed as ds",
        "deepspeed.zero.Init",
    ]
    names: dict[str, object] = {}
    exec(change_imports(tmp_path / "train.py", lines), names)  # the page's own
    assert names["deepspeed"] is names["ds"] is tiering
    assert (names["dist"], names["zero"]) == (tiering.comm, tiering.zero)
    assert names["FusedAdam"] is tiering.ops.adam.FusedAdam


@pytest.mark.parametrize("name", ["deepspeed", "deepspeed.comm", "deepspeed.ops.adam"])
@pytest.mark.parametrize("end", ["", "\r", "  ", "  # type: ignore", "  # remark\r", ", os", "; import os"])
def test_an_import_keeps_its_name_however_its_line_ends(tmp_path: Path, name: str, end: str) -> None:
    changed = change_imports(
        tmp_path / "train.py", ["if True:", f"\timport {name}{end}", "deepspeed.comm.get_rank()"]
    )
    names: dict[str, object] = {}
    exec(changed, names)
    assert names["deepspeed"] is tiering
    assert changed.splitlines()[1].endswith(end.strip()) and ("\r" in changed) == ("\r" in end)


def test_the_names_are_there() -> None:
    table, _, absent = (
        PAGE.partition("## Names")[2].partition("## Every key")[0].partition("### Unsupported names")
    )
    names = re.findall(r"`(deepspeed|engine)\.([\w.]+)(?:\(.*?\))?`", table)
    assert len(names) > 35
    for owner, path in names:
        if owner == "deepspeed":
            assert not isinstance(_named(path), Unsupported), path
        elif path not in ("parameters", "generate"):  # the module's
            assert hasattr(DeepSpeedEngine, path), path
    gone = "".join(row.split("|")[1] for row in absent.splitlines() if row.startswith("| `"))
    methods = re.findall(r"`engine\.(\w+)", gone)
    assert len(methods) > 2 and not any(hasattr(DeepSpeedEngine, name) for name in methods)


def _named(path: str) -> object:
    """The name at ``path`` below the package, as a script gets it: modules are imported first."""
    module, _, name = f"tiering.{path}".rpartition(".")
    return getattr(importlib.import_module(module), name)
