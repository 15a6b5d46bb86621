"""ZeRO stage 3 with parameters and optimizer state in host memory: a small GPT over bytes.

    python examples/zero3_offload/train.py
    torchrun --standalone --nproc-per-node=2 examples/zero3_offload/train.py --steps 100 --save DIRECTORY

It shows the differences of a script for stage 3: activations are recomputed (checkpointing.checkpoint), a parameter has
its values only inside GatheredParameters, and save_16bit_model gathers the whole model.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

import tiering as deepspeed
from tiering.demo.corpus import standard_library
from tiering.demo.model import GPT

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


class RecomputingGPT(GPT):
    """Saves the inputs of each block and recomputes the block in backward."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        stream = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            stream = deepspeed.checkpointing.checkpoint(block, stream)
        logits = self.head(self.norm(stream)).float()
        return (
            logits if targets is None else functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--local_rank", type=int, default=-1, help="from a launcher that gives it")
    parser.add_argument("--save", metavar="DIRECTORY", help="where to leave the weights, in 16 bits")
    parser = deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(Path(__file__).with_name("ds_config.json")))
    options = parser.parse_args(argv)

    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = RecomputingGPT(width=128, layers=4, heads=4, sequence=SEQUENCE)
    engine, optimizer, loader, _ = deepspeed.initialize(
        args=options,
        model=model,
        model_parameters=model.parameters(),
        training_data=Windows(standard_library()),
    )
    deepspeed.checkpointing.configure(None, deepspeed_config=options.deepspeed_config)
    first = deepspeed.comm.get_rank() == 0
    batches = deepspeed.utils.RepeatingLoader(loader)
    for step in range(options.steps):
        for _ in range(engine.gradient_accumulation_steps()):
            tokens, targets = next(batches)
            loss = engine(tokens.to(engine.device), targets.to(engine.device))
            engine.backward(loss)
            engine.step()
        if first:
            rate = optimizer.param_groups[0]["lr"]
            print(f"step {step + 1}: loss {loss.item():.4f}, lr {rate:.2e}", flush=True)

    with deepspeed.zero.GatheredParameters([model.head.weight, model.embedding.weight]):
        weights = model.head.weight, model.embedding.weight
        sizes = [weight.detach().float().norm().item() for weight in weights]
    if first:
        print(f"norm of the head {sizes[0]:.3f}, of the embedding {sizes[1]:.3f}")
    if options.save is not None:
        engine.save_16bit_model(options.save)
    engine.destroy()


if __name__ == "__main__":
    main()
