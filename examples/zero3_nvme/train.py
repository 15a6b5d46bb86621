"""ZeRO stage 3 with parameters and optimizer state on NVMe: a small GPT that is built without memory for it.

    python examples/zero3_nvme/train.py --nvme /local_nvme
    torchrun --standalone --nproc-per-node=2 examples/zero3_nvme/train.py --nvme /local_nvme --checkpoints runs/gpt

If you start it again with the same checkpoint directory, it resumes from the last checkpoint. A batch depends only on
its number, so the result does not depend on interruptions.

The section "tiering" in ds_config.json is specific to tiering. Without it, data that fits in memory would stay there,
and a model of this size would not use the disk.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

import tiering as deepspeed
from tiering.demo.corpus import Batches, standard_library
from tiering.demo.model import GPT

SEQUENCE = 64


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--local_rank", type=int, default=-1, help="from a launcher that gives it")
    parser.add_argument(
        "--nvme", metavar="DIRECTORY", help="swap directory, instead of the one in ds_config.json"
    )
    parser.add_argument("--checkpoints", metavar="DIRECTORY", help="save there, and go on from there")
    parser.add_argument("--save_interval", type=int, default=50, metavar="STEPS")
    parser = deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(Path(__file__).with_name("ds_config.json")))
    options = parser.parse_args(argv)

    config = json.loads(Path(options.deepspeed_config).read_text(encoding="utf-8"))
    options.deepspeed_config = None  # it goes as config=, changed
    if options.nvme is not None:
        for section in ("offload_param", "offload_optimizer"):
            config["zero_optimization"][section]["nvme_path"] = options.nvme

    deepspeed.init_distributed()
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = GPT(width=128, layers=4, heads=4, sequence=SEQUENCE)
    engine, *_ = deepspeed.initialize(
        args=options, model=model, model_parameters=model.parameters(), config=config
    )
    seen = 0
    if options.checkpoints is not None:
        path, client_state = engine.load_checkpoint(options.checkpoints)
        if path is not None:
            seen = client_state["samples"]

    rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    if seen and rank == 0:
        print(f"goes on behind {seen} samples")
    size = engine.train_micro_batch_size_per_gpu()
    batches = Batches(standard_library(), size=size, sequence=SEQUENCE, seed=1)
    while engine.global_steps < options.steps:
        tokens, targets = batches[seen // size + rank]
        loss = engine(tokens.to(engine.device), targets.to(engine.device))
        engine.backward(loss)
        engine.step()
        seen += size * ranks
        if rank == 0 and engine.was_step_applied():
            print(f"step {engine.global_steps}: loss {loss.item():.6f}", flush=True)
        # With gradient accumulation most calls of step() update nothing, and global_steps stays the same.
        due = engine.was_step_applied() and engine.global_steps % options.save_interval == 0
        if options.checkpoints is not None and due:
            engine.save_checkpoint(options.checkpoints, client_state={"samples": seen})
    engine.destroy()


if __name__ == "__main__":
    main()
