"""docs/tools/sizing.md is what the code makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.generate.sizing_page import SIZES, page

DOCS = Path(__file__).parents[2] / "docs"
FEW = ("1.5B", "3B")


def test_the_rows_of_small_models_are_what_the_code_makes() -> None:
    others = tuple(f"| {size} " for size in SIZES if size not in FEW)
    lines = (DOCS / "tools" / "sizing.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if not line.startswith(others)]
    assert squeezed(rows) == squeezed(page(FEW).splitlines())
    assert len(lines) - len(rows) == len(others) * (1 + 2 * 4)  # of the least, and of four machines


@pytest.mark.slow
def test_the_page_is_what_the_code_makes() -> None:
    assert (DOCS / "tools" / "sizing.md").read_text(encoding="utf-8") == page()


def squeezed(lines: list[str]) -> list[str]:
    """``lines`` with the columns of tables as narrow as they go."""
    return [line.replace(" ", "").replace("-", "") if line.startswith("|") else line for line in lines]
