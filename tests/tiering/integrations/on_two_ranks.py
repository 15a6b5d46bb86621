"""A program of two ranks: trains with the engine under the name of DeepSpeed, and then without, on the same batches.

    torchrun --nproc-per-node 2 -m tests.tiering.integrations.on_two_ranks FUNCTION DIRECTORY [ARGUMENT ...]

Each rank writes what it has seen to rank0.json or rank1.json in DIRECTORY.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tiering.integrations import deepspeed as shim

shim.install()

RANK = int(os.environ["RANK"])


def _counted(accelerator: Any) -> dict[str, Any]:
    """What an Accelerator knows of the ranks."""
    import torch

    return {
        "processes": accelerator.num_processes,
        "index": accelerator.process_index,
        "is main": accelerator.is_main_process,
        "gathered": accelerator.gather_for_metrics(torch.tensor([RANK])).tolist(),
        "kind": accelerator.distributed_type.value,
    }


def loop(directory: Path, place: str, stage: str) -> dict[str, Any]:
    """A loop of accelerate with a DeepSpeedPlugin. accelerate itself is not told that the ranks are on CPUs."""
    import accelerate
    from accelerate import DeepSpeedPlugin

    from .loops import Loop, accelerator, forget, parts
    from .trainers import config
    from .under_shim import AUTO

    settings = config(place, directory, int(stage)) | AUTO | {"gradient_clipping": 1.0}
    plugin = DeepSpeedPlugin(hf_ds_config=settings, gradient_accumulation_steps=2)
    made = accelerate.Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2)
    ours = Loop(made, *parts())
    seen = _counted(made) | {"batches": len(ours.loader), "reports": ours.run(20)}
    made.free_memory()
    forget()
    del os.environ["ACCELERATE_USE_DEEPSPEED"]
    with accelerator() as plain:
        stock = Loop(plain)
        seen["stock"] = _counted(plain) | {"batches": len(stock.loader), "reports": stock.run(20)}
    return seen


def trainer(directory: Path, place: str, stage: str, *options: str) -> dict[str, Any]:
    """A Trainer with ``TrainingArguments(deepspeed=...)``; "early": the program has asked for its rank before."""
    from accelerate import PartialState
    from transformers import Trainer

    from .loops import forget
    from .trainers import arguments, config, llama, reported, sentences, stock
    from .under_shim import AUTO

    if "early" in options:
        PartialState()
    given: dict[str, Any] = {"max_steps": 20, "eval_strategy": "steps", "eval_steps": 10}
    data = {"train_dataset": sentences(64), "eval_dataset": sentences(8, seed=8)}
    settings = config(place, directory, int(stage)) | AUTO
    args = arguments(directory / "out", **given, deepspeed=settings, use_cpu="use_cpu" in options)
    ours = Trainer(llama(), args, **data)
    ours.train()
    seen = _counted(ours.accelerator) | {"reports": reported(ours), "type": type(ours.model_wrapped).__name__}
    ours.accelerator.free_memory()
    forget()
    del os.environ["ACCELERATE_USE_DEEPSPEED"]
    plain = stock(directory / "stock", **given)
    plain.train()
    seen["stock"] = _counted(plain.accelerator) | {"reports": reported(plain)}
    return seen


if __name__ == "__main__":
    name, folder, *others = sys.argv[1:]
    found = globals()[name](Path(folder), *others)
    Path(folder, f"rank{RANK}.json").write_text(json.dumps(found))
