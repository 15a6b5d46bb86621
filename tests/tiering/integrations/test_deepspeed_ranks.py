"""The stock Trainer with DeepSpeed on two ranks, under the shim; test_deepspeed_trainer.py has the names."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from .line_trainers import arguments, ds_config
from .programs import TORCHRUN, output_of
from .shimmed import forget_process, under_shim
from .trainers import llama, reported, sentences

pytestmark = pytest.mark.slow

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def trained(
    output: Path, settings: Any, dtype: str = "fp32", resumed: Path | None = None, **options: Any
) -> Trainer:
    """A Trainer after a run of two epochs of four steps; without ``settings``, with DDP."""
    given = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "logging_steps": 2,
        "learning_rate": 1e-3,
    }
    args = arguments(output, settings, **given | options)
    data = {"train_dataset": sentences(32), "eval_dataset": sentences(8, seed=8)}
    model = llama(seed=3 if resumed is None else 99).to(DTYPES[dtype])
    # Without a section for a half precision, DeepSpeed trains in fp32.
    trainer = Trainer(model if settings else model.float(), args, **data)
    trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
    if settings is not None:
        assert trainer.model_wrapped.world_size == 2
    return trainer


def plain(output: Path, **options: Any) -> list[dict[str, float]]:
    """What a run with DDP reports."""
    found = reported(trained(output, None, **options))
    forget_process()
    return found


@pytest.mark.parametrize(("stage", "dtype"), [*itertools.product([2, 3], DTYPES)])
@under_shim(ranks=2)
def test_training(stage: int, dtype: str, tmp_path: Path) -> None:
    expected = plain(tmp_path / "ddp", dtype=dtype)
    trainer = trained(tmp_path / "out", ds_config(stage, "bf16", "fp16", "optimizer", "scheduler"), dtype)
    assert {param.dtype for param in trainer.model.parameters()} == {torch.float32}
    for entry, other in zip(reported(trainer), expected, strict=True):
        assert entry == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize(("stage", "half"), [*itertools.product([2, 3], ["bf16", "fp16"])])
@under_shim(ranks=2)
def test_training_mixed_precision(stage: int, half: str, tmp_path: Path) -> None:
    expected = plain(tmp_path / "ddp")
    settings = ds_config(stage, fp16={"enabled": "auto", "initial_scale_power": 8})
    trainer = trained(tmp_path / "out", settings, **{half: True})
    assert {param.dtype for param in trainer.model.parameters()} == {DTYPES[half]}
    for entry, other in zip(reported(trainer), expected, strict=True):
        assert entry["loss"] == pytest.approx(other["loss"], rel=0.02)


@pytest.mark.parametrize("stage", [2, 3])
@under_shim(ranks=2)
def test_training_with_gradient_accumulation(stage: int, tmp_path: Path) -> None:
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    expected = plain(tmp_path / "ddp", **options)
    trainer = trained(tmp_path / "out", ds_config(stage, "optimizer", "scheduler"), **options)
    assert trainer.model_wrapped.get_batch_info() == (8, 2, 2)
    for entry, other in zip(reported(trainer), expected, strict=True):
        assert entry == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
@under_shim(ranks=2)
def test_training_and_can_resume_normally(stage: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "bf16": True}
    whole = reported(trained(tmp_path / "out", ds_config(stage), **options))
    resumed = trained(tmp_path / "out", ds_config(stage), resumed=tmp_path / "out/checkpoint-2", **options)
    assert len(whole) == 4
    assert reported(resumed) == whole


@pytest.mark.parametrize(("stage", "sections"), [(2, 1), (3, 1), (3, 2)])
@under_shim(ranks=2)
def test_basic_run_with_cpu_offload(stage: int, sections: int, tmp_path: Path) -> None:
    expected = plain(tmp_path / "ddp")
    settings = ds_config(stage)
    for section in ("offload_optimizer", "offload_param")[:sections]:
        settings["zero_optimization"][section] = {"device": "cpu"}
    trainer = trained(tmp_path / "out", settings, bf16=True, max_steps=10)
    assert trainer.model_wrapped.zero_cpu_offload()
    assert len(reported(trainer)) == 5
    for entry, other in zip(reported(trainer), expected, strict=False):
        assert entry["loss"] == pytest.approx(other["loss"], rel=0.02)


@pytest.mark.parametrize("stage", [2, 3])
@under_shim(ranks=2)
def test_training_twice(stage: int, tmp_path: Path) -> None:
    runs = []
    for settings in (None, ds_config(stage, "optimizer", "scheduler")):
        trainer = trained(tmp_path, settings)
        runs.append(reported(trainer))
        # As with DeepSpeed, a training begins with a new optimizer.
        trainer.optimizer = None
        trainer.train()
        runs[-1] += reported(trainer)
        forget_process()
    assert len(runs[0]) == 8
    for entry, other in zip(*runs, strict=True):
        assert entry == pytest.approx(other, rel=1e-5)


@under_shim(ranks=2)
def test_eval(tmp_path: Path) -> None:
    losses = []
    for settings in (None, ds_config(3)):
        args = arguments(tmp_path, settings)
        losses.append(Trainer(llama(), args, eval_dataset=sentences(8, seed=8)).evaluate()["eval_loss"])
        forget_process()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


ENVIRONMENT_OF_A_RUN = """
import json, os, sys
from pathlib import Path
from transformers import HfArgumentParser, TrainingArguments, Trainer
from tests.tiering.integrations.trainers import llama

args = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()[0]
trainer = Trainer(llama(), args)
found, plugin = trainer.accelerator, trainer.accelerator.state.deepspeed_plugin
seen = {
    "variables": [os.environ[name] for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK")],
    "arguments": [args.world_size, args.process_index, args.local_process_index, str(args.parallel_mode)],
    "accelerator": [found.num_processes, found.process_index, found.local_process_index, found.use_distributed],
    "main": [found.is_main_process, found.is_local_main_process],
    "type": str(found.distributed_type),
    "enabled": [trainer.is_deepspeed_enabled, trainer.is_fsdp_enabled],
    "stage": plugin.zero_stage,
    "offload": [plugin.offload_optimizer_device, plugin.offload_param_device],
}
Path(args.output_dir, f"rank{args.process_index}.json").write_text(json.dumps(seen))
"""


def launched(directory: Path, *command: str) -> list[dict[str, Any]]:
    """What each of two ranks sees when it is launched by ``command`` under the shim."""
    directory.mkdir()
    output_of("-m", "tiering.integrations.deepspeed", *command, "--output_dir", str(directory))
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("stage", [2, 3], ids=["zero2", "zero3"])
def test_torchrun_accelerate_deepspeed_env_parity(stage: int, tmp_path: Path) -> None:
    script, settings, yaml = tmp_path / "env.py", tmp_path / "ds_config.json", tmp_path / "accelerate.yaml"
    script.write_text(ENVIRONMENT_OF_A_RUN)
    settings.write_text(json.dumps(ds_config(stage)))
    yaml.write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 2\nnum_machines: 1\nmachine_rank: 0\nmain_process_port: 0\n"
        f"deepspeed_config:\n  zero_stage: {stage}\n  gradient_accumulation_steps: 1\n"
        "  offload_optimizer_device: none\n  offload_param_device: none\n  zero3_init_flag: false\n"
    )
    torchrun = [*TORCHRUN, str(script)]
    accelerate = ["-m", "accelerate.commands.launch", "--config_file", str(yaml), str(script)]
    by_torchrun = launched(tmp_path / "torchrun", *torchrun, "--deepspeed", str(settings))
    by_accelerate = launched(tmp_path / "accelerate", *accelerate)
    assert by_torchrun == by_accelerate
    for rank, seen in enumerate(by_torchrun):
        assert seen == {
            "variables": ["2", str(rank), str(rank)],
            "arguments": [2, rank, rank, "ParallelMode.DISTRIBUTED"],
            "accelerator": [2, rank, rank, True],
            "main": [rank == 0, rank == 0],
            "type": "DistributedType.DEEPSPEED",
            "enabled": [True, False],
            "stage": stage,
            "offload": ["none", "none"],
        }
