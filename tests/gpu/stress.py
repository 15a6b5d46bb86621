"""Training with its streams held up at random, in a process without pytest, for what watches every access of a kernel.

    python tests/gpu/stress.py --seconds 50
    compute-sanitizer --tool memcheck --error-exitcode 9 python tests/gpu/stress.py --seconds 50

Each placement is trained with delays (delays.py) drawn anew in every round, and has to end with the bits of a run with
everything on the device: the exit status is 1 if one does not. In every other round groups are unsharded in memory of
torch's allocator, and not in the slab. With PYTORCH_NO_CUDA_MEMORY_CACHING=1 each tensor is an allocation of CUDA's, so
that memcheck sees where it ends; with PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync and --track-stream-ordered-races
all it sees which stream uses one before its time or after it. It does not count an order that the CPU has seen by a
query of an event: for it, --wait-on-device lets compute wait for each copy, also for one that has ended.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import tiering
from tests.gpu.conftest import SmallModel, batches, config
from tests.gpu.delays import Delays
from tiering.telemetry import COPIES_OF
from zero3.device import tiers
from zero3.device.link_copies import Copies
from zero3.device.streams import Event

HOST = {"offload_param": "cpu", "offload_optimizer": "cpu"}
NVME = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "host, room for few groups": HOST | {"device_budget": "1MiB"},
    "nvme, nothing persistent": NVME | {"threshold": 0, "device_budget": "1MiB"},
    "optimizer on host": {"offload_optimizer": "cpu"},
    "host, accumulated": HOST | {"accumulation": 2},
}
STEPS = 2


def wait_on_device(copies: Copies, event: Event, cause: str) -> None:
    """In place of ``Copies.hold_compute``, which queues no wait for an event that has come."""
    copies._stalls.hold(event, COPIES_OF + cause)


def trained(nvme: Path, delays: Delays | None, **options: Any) -> int:
    """A checksum of the losses, norms and masters that a training leaves."""
    torch.manual_seed(3)
    model: torch.nn.Module = SmallModel()
    if delays is not None:
        model = delays.hold_up(model)
    settings = config(nvme, **options)
    with tiering.initialize(model=model, config=settings).engine as engine:
        steps = []
        for tokens, targets in batches(STEPS * engine.settings.gradient_accumulation_steps):
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            steps.append((loss, engine.get_global_grad_norm()))
        numbers = repr([(loss.item(), norm) for loss, norm in steps])
        masters = sorted(
            (name.replace(".block.", "."), master) for name, master in engine.master_state_dict().items()
        )
        return zlib.crc32(
            b"".join(master.numpy().tobytes() for _, master in masters), zlib.crc32(numbers.encode())
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=50.0, help="begin no further training after so long")
    parser.add_argument(
        "--wait-on-device",
        action="store_true",
        help="queue a wait for each copy, also for one that has ended",
    )
    parser.add_argument("--no-delays", action="store_true", help="let streams run as they like")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch finds no CUDA device")
        return 2
    began = time.monotonic()
    torch.use_deterministic_algorithms(True)
    wrong = done = 0
    with tempfile.TemporaryDirectory() as directory:
        references = dict[int, int]()
        for seed, (name, placement) in ((s, each) for s in itertools.count(1) for each in PLACEMENTS.items()):
            accumulation = placement.get("accumulation", 1)
            if accumulation not in references:
                references[accumulation] = trained(Path(directory), None, accumulation=accumulation)
            if time.monotonic() - began > options.seconds:
                break
            resized = seed % 2 == 0
            with ExitStack() as stack:
                if options.wait_on_device:
                    stack.enter_context(mock.patch.object(Copies, "hold_compute", wait_on_device))
                if resized:
                    stack.enter_context(mock.patch.object(tiers, "can_exchange", return_value=False))
                delays = None if options.no_delays else stack.enter_context(Delays(seed))
                same = trained(Path(directory), delays, **placement) == references[accumulation]
            done, wrong = done + 1, wrong + (not same)
            print(
                f"{time.monotonic() - began:6.1f} s  seed {seed}  {name}{', resized' if resized else ''}:"
                f" {'same bits' if same else 'OTHER BITS'}",
                flush=True,
            )
    print(f"{done} trainings, {wrong} with other bits")
    return 1 if wrong or not done else 0


if __name__ == "__main__":
    sys.exit(main())
