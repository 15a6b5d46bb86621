"""A BERT of transformers learns to fill in masked bytes; its optimizer runs on the CPU.

    python examples/bert_mlm/train.py
    torchrun --standalone --nproc-per-node=2 examples/bert_mlm/train.py --steps 200

The model starts from random weights. The text is the source code of Python's standard library, which every machine has.
ds_config.json keeps the optimizer state in host memory ("offload_optimizer"). DeepSpeedCPUAdam gets two groups of
parameters, because biases and norms have no weight decay.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

import tiering as deepspeed
from tiering.demo.corpus import standard_library
from tiering.ops.adam import DeepSpeedCPUAdam

try:
    from transformers import BertConfig, BertForMaskedLM
except ImportError as error:
    raise SystemExit("this example needs transformers: pip install transformers") from error

SEQUENCE, MASK = 64, 256  # the tokens are the bytes, and one more token is the mask
NO_TARGET = -100


class MaskedText(Dataset[dict[str, Tensor]]):
    """Pieces of a text. 3 of 20 bytes are targets, and most targets are masked, as in the paper."""

    def __init__(self, text: bytes) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.text) // SEQUENCE

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        piece = self.text[index * SEQUENCE : (index + 1) * SEQUENCE].long()
        generator = torch.Generator().manual_seed(index)
        target = torch.rand(SEQUENCE, generator=generator) < 0.15
        fate = torch.rand(SEQUENCE, generator=generator)
        shown = piece.masked_fill(target & (fate < 0.8), MASK)
        other = torch.randint(256, (SEQUENCE,), generator=generator)
        shown = torch.where(target & (fate > 0.9), other, shown)
        return {"input_ids": shown, "labels": piece.masked_fill(~target, NO_TARGET)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--local_rank", type=int, default=-1, help="from a launcher that gives it")
    parser = deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(Path(__file__).with_name("ds_config.json")))
    options = parser.parse_args(argv)

    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=MASK + 1,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=512,
            max_position_embeddings=SEQUENCE,
        )
    )
    decays = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() <= 1]
    optimizer = DeepSpeedCPUAdam(
        [{"params": decays, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}], lr=1e-3
    )
    engine, _, loader, _ = deepspeed.initialize(
        args=options, model=model, optimizer=optimizer, training_data=MaskedText(standard_library())
    )
    if engine.global_rank == 0:
        print(f"ZeRO stage {engine.zero_optimization_stage()}, {engine.train_batch_size()} samples a step")
    engine.train()
    batches = deepspeed.utils.RepeatingLoader(loader)
    while engine.global_steps < options.steps:
        batch = {name: tensor.to(engine.device) for name, tensor in next(batches).items()}
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0:
            norm = float(engine.get_global_grad_norm())
            print(f"step {engine.global_steps}: loss {loss.item():.4f}, norm {norm:.3f}", flush=True)
    engine.destroy()


if __name__ == "__main__":
    main()
