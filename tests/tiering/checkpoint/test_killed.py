"""Saves that are killed: the last checkpoint is found, whole, and the next save goes on from there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiering.checkpoint import killed

SCRIPT = Path(killed.__file__)


@pytest.fixture
def directory(memory: Path) -> Iterator[Path]:
    """SIGKILL takes nothing from the page cache, so a disk would only be slower."""
    with tempfile.TemporaryDirectory(dir=memory) as place:
        yield Path(place) / "checkpoints"


def counts_of(*arguments: object) -> dict[str, int]:
    """What the program counted. A checkpoint that was lost ends it."""
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(SCRIPT.parents[3])},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert ran.returncode == 0, ran.stderr
    counted: dict[str, int] = json.loads(ran.stdout)
    return counted


@pytest.mark.one_of(2)
@pytest.mark.parametrize(("moment", "kills", "each"), [("operations", 80, 10), ("renames", 20, 2)])
def test_killed_before_each_operation(directory: Path, moment: str, kills: int, each: int) -> None:
    counted = counts_of(moment, directory)
    assert counted["kills"] > kills
    assert min(counted["old"], counted["new"], counted["partials"]) > each


@pytest.mark.slow
def test_killed_at_any_moment(directory: Path) -> None:
    counted = counts_of("moments", directory, 60, 20261122)
    assert counted["kills"] == 60
    assert min(counted["old"], counted["new"], counted["partials"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_thousands_of_moments(directory: Path, seed: int) -> None:
    assert counts_of("moments", directory, 1000, seed)["kills"] == 1000


def test_the_program_loads_no_torch() -> None:
    """Or a fork would take ten times as long."""
    code = "import sys, tests.tiering.checkpoint.killed; print('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[3])}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout == "False\n"
