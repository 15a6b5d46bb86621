"""LoRA adapters over a frozen model on NVMe, in less memory than the model.

    python examples/lora_nvme.py --nvme /local_nvme
    python examples/lora_nvme.py --nvme /local_nvme --model Llama-3.1-8B/ --host-budget 8GiB --save adapter/

Without --model, the frozen model is a small Llama over bytes with random weights. Its text is the source code of
Python's standard library, so nothing is downloaded. With --model, the weights go from the safetensors files of that
directory to NVMe, and the text is tokenized as that model expects. The result is an adapter that peft loads.

A step reads the frozen weights from NVMe, and writes nothing there if the host budget has room for the adapters. With
--base, the linear layers of the frozen model are stored in 4 or 8 bits: qlora_nvme.py is this script with --base nf4.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import Tensor, nn

import tiering
from tiering.demo.corpus import Batches, standard_library

SEQUENCE = 128
SMALL = transformers.LlamaConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=SEQUENCE,
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nvme", required=True, metavar="DIRECTORY", help="swap directory on a local drive")
    parser.add_argument(
        "--model", type=Path, metavar="DIRECTORY", help="a transformers model with its tokenizer"
    )
    parser.add_argument(
        "--base", choices=("bf16", "nf4", "int8", "fp8"), default="bf16", help="of frozen layers"
    )
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--host-budget", default="4MiB", metavar="SIZE", help="for a real model, some GiB")
    parser.add_argument("--save", type=Path, metavar="DIRECTORY", help="save the adapter there")
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    model = peft.get_peft_model(
        frozen_model(options.model, options.base),
        peft.LoraConfig(r=options.rank, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    nvme = {"device": "nvme", "nvme_path": options.nvme}
    engine = tiering.initialize(
        model=model,
        weights=options.model,
        config={
            "train_micro_batch_size_per_gpu": options.batch,
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-3 if options.model is None else 2e-4}},
            "zero_optimization": {
                "stage": 3,
                "offload_param": nvme,
                "offload_optimizer": nvme,
                # Smaller parameters stay on the device: with the usual 100,000 most of the small model would.
                "stage3_param_persistence_threshold": 1_000 if options.model is None else 100_000,
            },
            "tiering": {"host_budget": options.host_budget},
        },
    ).engine
    read, written = engine.plan.nvme_traffic()
    print(f"a step reads {read} bytes from NVMe and writes {written}")

    batch = text_of(options.model, size=options.batch)
    for step in range(1, options.steps + 1):
        tokens = batch(step).to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        print(f"step {step}: loss {loss.item():.6f}", flush=True)
    if options.save is not None:
        print(f"saved {engine.save_pretrained(options.save)}")
    engine.close()


def frozen_model(files: Path | None, base: str) -> nn.Module:
    """The model of ``files``, or the small one. A model of files takes no memory before ``initialize``."""
    config = SMALL if files is None else transformers.AutoConfig.from_pretrained(files)
    if base == "bf16":
        with tiering.zero.Init():
            return transformers.AutoModelForCausalLM.from_config(config)
    # The weights of a model on the meta device are encoded while they stream from its files.
    with torch.device("cpu" if files is None else "meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return tiering.quantize(model.requires_grad_(False), base)


def text_of(model: Path | None, *, size: int) -> Callable[[int], Tensor]:
    """A function from the number of a step to its tokens, int64 [size, SEQUENCE]."""
    batches = Batches(
        standard_library(), size=size, sequence=SEQUENCE if model is None else 16 * SEQUENCE, seed=1
    )
    if model is None:
        return lambda step: batches[step][0]
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model)

    def tokens(step: int) -> Tensor:
        texts = [bytes(row.tolist()).decode(errors="replace") for row in batches[step][0]]
        return torch.tensor([tokenizer(text)["input_ids"][:SEQUENCE] for text in texts])

    return tokens


if __name__ == "__main__":
    main()
