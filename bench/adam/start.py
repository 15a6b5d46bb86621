"""From nothing to the first step, in fresh processes that have imported torch already."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from frame.side import PEER_RECIPE, SideError, environment

from .readings import Row

OURS = "ours"

IMPORTS = {
    OURS: "from optim_cpu import AdamW",
    "torch fused": "import functools; AdamW = functools.partial(torch.optim.AdamW, fused=True)",
    "DeepSpeedCPUAdam": "from deepspeed.ops.adam import DeepSpeedCPUAdam as AdamW",
}

MODEL = "24 tensors of 65,536 elements"

PROGRAM = """
import time, torch
parameters = [torch.nn.Parameter(torch.randn(256, 256)) for _ in range(24)]
for parameter in parameters:
    parameter.grad = torch.randn_like(parameter)
before = [parameter.detach().clone() for parameter in parameters]
began = time.perf_counter()
{imports}
AdamW(parameters, lr=1e-3).step()
seconds = time.perf_counter() - began
assert not any(torch.equal(*pair) for pair in zip(before, parameters)), "the step changed nothing"
print("", 1e3 * seconds)
"""


def first_step(python: Path, imports: str, variables: Mapping[str, str]) -> float:
    """Milliseconds from the import to the end of the first step, in a new process."""
    done = subprocess.run(
        [python, "-c", PROGRAM.format(imports=imports)], env=variables, capture_output=True, text=True
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise SideError(
            f"{python}: {imports!r} and a first step ended with {last[0]!r}; for a peer, {PEER_RECIPE}"
        )
    return float(done.stdout.split()[-1])


def rows(peers: Path | None, threads: int) -> list[Row]:
    """Ours and torch's under this interpreter, DeepSpeed's under ``peers``."""
    here = Path(sys.executable)
    pythons = {OURS: here, "torch fused": here} | ({"DeepSpeedCPUAdam": peers} if peers else {})
    return [
        Row(name, 0, 0, partial(first_step, python, IMPORTS[name], variables))
        for name, python in pythons.items()
        for variables in [environment(python, threads) if python == peers else dict(os.environ)]
    ]
