"""A program: runs one of its functions with the engine under the name of DeepSpeed, and prints the result as JSON.

python -m tests.tiering.integrations.under_shim FUNCTION [ARGUMENT ...]
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tiering.integrations import deepspeed as shim

shim.install()

AUTO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
}


def names() -> dict[str, Any]:
    """What a program sees of the name."""
    import deepspeed
    import deepspeed.utils.z3_leaf_module
    from deepspeed.moe.layer import MoE

    import tiering.comm

    try:
        MoE(hidden_size=4)
        use = ""
    except AttributeError as error:
        use = str(error)
    before = deepspeed.comm is tiering.comm, tiering.comm.__spec__.name
    leaves = sys.modules["deepspeed.utils.z3_leaf_module"]
    before = *before, leaves is sys.modules["tiering.utils.z3_leaf_module"], callable(leaves)
    child = "import deepspeed; print(deepspeed.__version__)"
    children = subprocess.run(
        [sys.executable, "-c", child], capture_output=True, text=True, check=True
    ).stdout
    found = find_spec("deepspeed") is not None, find_spec("deepspeed.no_such_module") is None
    mapping = importlib.metadata.packages_distributions()["deepspeed"]
    versions = [deepspeed.__version__, importlib.metadata.version("deepspeed"), children.strip()]
    shim.uninstall()
    left = [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]
    return {
        "use": use,
        "same": before,
        "found": found,
        "mapping": mapping,
        "versions": versions,
        "uninstalled": [left, find_spec("deepspeed"), os.environ.get("PYTHONPATH", "")],
    }


def trainer(place: str, stage: str, directory: str, *options: str) -> dict[str, Any]:
    """The reports of transformers' own Trainer with ``TrainingArguments(deepspeed=...)``, and of runs after it."""
    import accelerate.state
    from transformers import Trainer

    from .loops import state
    from .trainers import ADAMW, arguments, config, different, llama, reported, sentences, stock

    settings = config(place, Path(directory), int(stage)) | AUTO
    if "optimizer" in options:
        settings["optimizer"] = ADAMW
    given: dict[str, Any] = {"max_steps": 20, "eval_strategy": "steps", "eval_steps": 10}
    # An optimizer of the configuration decays all weights; that of transformers leaves out norms and biases.
    given |= {"weight_decay": 0.0} if "optimizer" in options else {}
    plain = stock(Path(directory, "stock"), llama(), **given)
    plain.train()
    accelerate.state.AcceleratorState._reset_state(True)
    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": 10}
    # With use_cpu, transformers would not use DeepSpeed.
    saves |= {"deepspeed": settings, "use_cpu": False}
    data = {"train_dataset": sentences(64), "eval_dataset": sentences(8, seed=8)}
    ours = Trainer(llama(), arguments(Path(directory, "out"), **given, **saves), **data)
    ours.train()
    reports, kind, left = reported(ours), type(ours.model_wrapped).__name__, state(ours.model_wrapped)
    saves["save_strategy"] = "no"
    again = Trainer(llama(seed=99), arguments(Path(directory, "again"), **given, **saves), **data)
    again.train(resume_from_checkpoint=str(Path(directory, "out/checkpoint-10")))
    ended = state(again.model_wrapped)
    return {
        "reports": reports,
        "stock": reported(plain),
        "type": kind,
        "resumed": different(left, ended),
    }


def loop(stage: str, directory: str) -> dict[str, Any]:
    """The reports of a loop of accelerate with a DeepSpeedPlugin, and those without."""
    import accelerate
    from accelerate import DeepSpeedPlugin

    from .loops import Loop, parts, run
    from .trainers import config, llama

    plain = run(0, None, 20)
    plugin = DeepSpeedPlugin(
        hf_ds_config=config("nvme", Path(directory), int(stage)) | AUTO | {"gradient_clipping": 1.0},
        gradient_accumulation_steps=2,
    )
    # With cpu=True, accelerate would not use DeepSpeed.
    made = accelerate.Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2)
    prepared = Loop(made, *parts(llama()))
    reports = prepared.run(20)
    made.free_memory()
    return {"reports": reports, "stock": plain, "type": type(prepared.model).__name__}


def loop_and_trainer(directory: str) -> dict[str, Any]:
    """Both with stage 3 on NVMe, in the process that has imported the libraries."""
    from .shimmed import forget_process

    reports = {"loop": loop("3", directory)}
    forget_process()
    return reports | {"trainer": trainer("nvme", "3", directory)}


def early() -> str:
    """The error of an install after accelerate, which has found no DeepSpeed."""
    shim.uninstall()
    import accelerate  # noqa: F401

    try:
        shim.install()
    except shim.EngineStateError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
