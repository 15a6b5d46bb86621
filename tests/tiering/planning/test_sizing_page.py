"""docs/sizing.md is what the code makes, and what it tells people to type can be typed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tiering import cli
from tiering.planning.sizing_page import SIZES, page

DOCS = Path(__file__).parents[3] / "docs"
FEW = ("1.5B", "3B")


def test_the_rows_of_small_models_are_what_the_code_makes() -> None:
    others = tuple(f"| {size} " for size in SIZES if size not in FEW)
    lines = (DOCS / "sizing.md").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if not line.startswith(others)]
    assert squeezed(kept) == squeezed(page(FEW).splitlines())
    assert len(lines) - len(kept) == len(others) * (1 + 2 * 4)  # of the least, and of four machines


@pytest.mark.slow
def test_the_page_is_what_the_code_makes() -> None:
    assert (DOCS / "sizing.md").read_text(encoding="utf-8") == page()


def squeezed(lines: list[str]) -> list[str]:
    """``lines`` with the columns of tables as narrow as they go."""
    return [line.replace(" ", "").replace("-", "") if line.startswith("|") else line for line in lines]


@pytest.mark.parametrize("name", ["sizing.md", "../README.md"])
def test_the_commands_can_be_typed(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    commands = [line.strip() for line in text.splitlines() if line.startswith("    tiering plan ")]
    assert commands
    for command in commands:
        options = cli._parser().parse_args(shlex.split(command, comments=True)[1:])
        assert (options.params is None) is not (options.model is None)
