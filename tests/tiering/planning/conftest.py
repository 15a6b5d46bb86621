"""Fixtures of the planner's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiering import cli

from .asking import Plan


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Plan:
    """``tiering plan`` with arguments: (exit code, standard output, standard error), in 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        code = cli.main(["plan", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
