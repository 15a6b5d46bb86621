"""No circles: modules import each other in one direction, inside functions and for type checkers, too."""

from __future__ import annotations

from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

PACKAGES = ("zero3", "tiering", "service", "optim_cpu")


def circle(imports: Mapping[str, set[str]]) -> list[str]:
    """Modules of ``imports`` of which each is imported by the next, and the first is the last; empty if none are."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def imports_of(*packages: str) -> dict[str, set[str]]:
    graph = grimp.build_graph(*packages, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def test_no_module_imports_itself_through_others() -> None:
    imports = imports_of(*PACKAGES)
    assert "zero3.device.tiers" in imports["zero3.params.param_group"], "the graph is not that of the project"
    assert circle(imports) == []


def test_a_circle_for_type_checkers_and_inside_a_function_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "round_about"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "a.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from round_about import b\n"
    )
    (package / "b.py").write_text("def call() -> None:\n    from round_about import a\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert set(circle(imports_of("round_about"))) == {"round_about.a", "round_about.b"}
