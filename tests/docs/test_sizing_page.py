"""docs/tools/sizing.md is what the code makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.generate.sizing_page import MODELS, SIZES, page

DOCS = Path(__file__).parents[2] / "docs"
FEW = ("1.5B",)


def test_the_rows_of_small_models_are_what_the_code_makes() -> None:
    others = tuple(f"| {size} " for size in SIZES if size not in FEW)
    models = tuple(f"| {model} " for model in MODELS[1:])
    lines = (DOCS / "tools" / "sizing.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if not line.startswith((*others, *models))]
    assert squeezed(rows) == squeezed(page(FEW, MODELS[:1]).splitlines())
    # Of the least, and of four machines; of adapters over two bases: of the least, and of three machines.
    assert len(lines) - len(rows) == len(others) * (1 + 2 * 4) + len(models) * 2 * 4


@pytest.mark.slow
def test_the_page_is_what_the_code_makes() -> None:
    assert (DOCS / "tools" / "sizing.md").read_text(encoding="utf-8") == page()


def squeezed(lines: list[str]) -> list[str]:
    """``lines`` with the columns of tables as narrow as they go."""
    return [line.replace(" ", "").replace("-", "") if line.startswith("|") else line for line in lines]
