"""Two ranks on two GPUs over NCCL: every stage and placement gives the same bits.

torchrun runs this file as a script.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu

CPU, NVME = {"offload_optimizer": "cpu"}, {"offload_optimizer": "nvme", "cache_in_host": False}
PLACES: list[tuple[int, dict[str, Any]]] = [
    *((stage, offload) for stage in (3, 2, 1) for offload in ({}, CPU, NVME)),
    (0, {}),
    (3, {**CPU, "offload_param": "cpu"}),
    (3, {**NVME, "offload_param": "nvme"}),
    (3, {**NVME, "offload_param": "nvme", "prefetch": 0}),
]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_every_stage_and_placement_gives_the_same_bits(nvme: Path, precision: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, torch finds {torch.cuda.device_count()}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ran = subprocess.run(
        [*torchrun, __file__, str(nvme), precision], capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len(set(ran.stdout.split())) == 1, ran.stdout
    assert len(ran.stdout.split()) == 2 * len(PLACES)


def digest(nvme: Path, precision: str, stage: int, options: dict[str, Any]) -> str:
    """Of the losses, norms and masters that a training on all ranks leaves."""
    import tiering
    from tests.gpu.conftest import SmallModel, batches, config

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    settings = config(nvme, precision=precision, **options) | {"train_micro_batch_size_per_gpu": 4 // size}
    settings["zero_optimization"]["stage"] = stage
    torch.manual_seed(rank)  # rank 0's values count
    with tiering.initialize(model=SmallModel(), config=settings).engine as engine:
        norms = []
        for tokens, targets in batches(5):
            engine.backward(engine(tokens.chunk(size)[rank], targets.chunk(size)[rank]))
            engine.step()
            norms.append(engine.get_global_grad_norm())
        trained = b"".join(master.numpy().tobytes() for master in engine.master_state_dict().values())
    return f"{zlib.crc32(trained + repr(norms).encode()):08x}"


def main(nvme: str, precision: str) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.use_deterministic_algorithms(True)
    for stage, options in PLACES:
        print(digest(Path(nvme), precision, stage, options), flush=True)


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2]))
    main(*sys.argv[1:])
