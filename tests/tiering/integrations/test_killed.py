"""A run that is killed at any moment resumes, and ends with the bits of one that was not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "kills"), [(1, 30), (2, 12)])
@pytest.mark.parametrize("front", ["trainer", "loop"])
def test_a_killed_run_ends_with_the_same_bits(front: str, ranks: int, kills: int, tmp_path: Path) -> None:
    arguments = [front, str(tmp_path / "lives"), str(ranks), str(kills), "7", "16"]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.tiering.integrations.lives", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=600,
    )
    logs = [path.read_text()[-4000:] for path in tmp_path.glob("lives/*.log")]
    assert ran.returncode == 0, "\n".join([ran.stderr, *logs])
    outcome = json.loads(ran.stdout.splitlines()[-1])
    assert outcome["wrong"] == []
    assert outcome["tensors"] == 21 * 3
    assert outcome["same reports"]
    assert outcome["kills"] >= 1
    assert max(outcome["after"]) > 0
