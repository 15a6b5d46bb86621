"""bench_start.py runs: the same losses with a base that is read in place, which takes no swap space."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "bench_start.py"


@pytest.mark.slow
def test_both_sides_start(tmp_path: Path) -> None:
    options = ["--layers", "1", "--tokens", "4", "--steps", "2", "--shards", "2", "--device-budget", "512MiB"]
    command = [sys.executable, str(SCRIPT), str(tmp_path), *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=200)
    assert "losses         equal" in done.stdout
    sizes = dict(re.findall(r"^(swap|in place) +in place +([\d.]+) MB", done.stdout, re.MULTILINE))
    assert float(sizes["swap"]) < 1 < 100 < float(sizes["in place"])
