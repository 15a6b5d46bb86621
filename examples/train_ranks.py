"""Trains a small byte-level GPT on as many ranks as torchrun starts, on GPUs if there are any.

    torchrun --standalone --nproc-per-node=2 examples/train_ranks.py --stage 3
    torchrun --standalone --nproc-per-node=2 examples/train_ranks.py --stage 3 --nvme DIRECTORY
    torchrun --standalone --nproc-per-node=2 examples/train_ranks.py --checkpoints DIRECTORY  # resumes

Only three things are specific to ranks: one rank prints, all ranks call collective functions (``state_dict``), and each
rank gets its part of the data. `python examples/train_ranks.py` runs the script in one process.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

import tiering
from tiering.demo.corpus import standard_library
from tiering.demo.model import GPT

RANK = int(os.environ.get("RANK", "0"))
SEQUENCE = 64


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text, and the same pieces shifted by one byte."""

    def __init__(self, text: bytes) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.text) - 1) // SEQUENCE

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[index * SEQUENCE : (index + 1) * SEQUENCE + 1].long()
        return window[:-1], window[1:]


def configuration(options: argparse.Namespace) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": options.stage, "stage3_param_persistence_threshold": 1000}
    if options.nvme is not None:
        swap = {"device": "nvme", "nvme_path": str(options.nvme)}
        zero |= {"offload_optimizer": swap} | ({"offload_param": swap} if options.stage == 3 else {})
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
        # Of the whole node: ranks divide them. With NVMe nothing is kept in memory that need not be there.
        "tiering": {"device_budget": "1GiB", "host_budget": "1GiB", "cache_in_host": options.nvme is None},
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, choices=range(4), default=3)
    parser.add_argument("--nvme", type=Path, metavar="DIRECTORY", help="swap there what may leave the device")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--checkpoints", type=Path, metavar="DIRECTORY", help="save there, and go on from there"
    )
    parser.add_argument("--weights", type=Path, metavar="FILE", help="where to save them at the end")
    options = parser.parse_args(argv)

    torch.manual_seed(0)  # the same model on every rank
    model = GPT(width=128, layers=4, heads=4, sequence=SEQUENCE)
    data = Windows(standard_library())
    engine, _, loader, _ = tiering.initialize(model=model, config=configuration(options), training_data=data)
    if RANK == 0:
        print(engine.plan)
    if options.checkpoints is not None:
        engine.load_checkpoint(options.checkpoints)
        engine.save_and_exit_on(save_dir=options.checkpoints)  # SIGTERM, SIGUSR1: exit code 75
    for inputs, targets in loader:
        loss = engine(inputs.to(engine.device), targets.to(engine.device))
        engine.backward(loss)
        engine.step()
        if RANK == 0 and engine.was_step_applied():
            print(f"step {engine.global_steps}: loss {loss.item():.3f}")
        # With gradient accumulation most calls of step() update nothing, and global_steps stays the same.
        due = engine.was_step_applied() and engine.global_steps % 10 == 0
        if options.checkpoints is not None and due:
            engine.save_checkpoint(options.checkpoints, keep=2, background=True)
        if engine.global_steps >= options.steps:
            break
    weights = engine.state_dict()  # all ranks call it
    if RANK == 0 and options.weights is not None:
        torch.save(weights, options.weights)
    engine.close()


if __name__ == "__main__":
    main()
