"""Python programs that tests of front ends start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
    "CUDA_VISIBLE_DEVICES": "",
}
"""The environment of the programs."""

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def output_of(*arguments: str, directory: Path = ROOT) -> str:
    """The standard output of ``python *arguments`` in ``directory``, which must succeed."""
    return finished(*arguments, directory=directory).stdout


def finished(*arguments: str, directory: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """``python *arguments`` in ``directory``, which must succeed, with its output."""
    ran = subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-8000:]
    return ran
