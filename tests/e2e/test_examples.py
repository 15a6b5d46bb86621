"""The scripts in examples/ do what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.run import parse_args

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_ranks_train_and_one_of_them_prints(tmp_path: Path, ranks: int) -> None:
    weights = tmp_path / "weights.pt"
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    script = [str(EXAMPLES / "train_ranks.py"), "--stage", "3", "--steps", "3"]
    done = subprocess.run(
        [sys.executable, *launch, *script, "--nvme", str(tmp_path), "--weights", str(weights)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d: loss ([\d.]+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert done.stdout.count("Placement plan") == 1
    saved = torch.load(weights)
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert saved["embedding.weight"].shape == (256, 128)


def test_the_slurm_script_is_one(tmp_path: Path) -> None:
    """With srun and scontrol in its path that only show what they were called with."""
    for name, says in (("srun", 'printf "%s\\n" "$@"'), ("scontrol", 'printf "node7\\nnode8\\n"')):
        tool = tmp_path / name
        tool.write_text(f"#!/bin/sh\n{says}\n")
        tool.chmod(0o755)
    given = {
        "SLURM_CPUS_PER_TASK": "96",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_JOB_ID": "4711",
    }
    done = subprocess.run(
        ["bash", str(EXAMPLES / "ranks.sbatch")],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "node[7-8]"} | given,
    )
    called = done.stdout.splitlines()
    assert called[:2] == ["--cpus-per-task=96", "torchrun"]
    launch = parse_args(called[2:])
    assert (launch.nnodes, launch.nproc_per_node, launch.rdzv_id) == ("2", "8", "4711")
    assert launch.rdzv_endpoint == "node7:29500"
    assert (EXAMPLES.parent / launch.training_script).is_file()
