"""Names of DeepSpeed that do not exist here: imported without an error, and refused with the replacement when used."""

from __future__ import annotations

import copy
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Optional

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tiering as deepspeed
from tiering import _unsupported
from tiering._placeholders import Unsupported
from tiering.errors import ConfigError, EngineStateError, TieringError, UnsupportedNameError
from zero3.deepspeed import communication

from .deepspeed_names import NAMES

RECORDED = json.loads(NAMES.read_text(encoding="utf-8"))

SCRIPT = """
import sys
import tiering as deepspeed, tiering.moe.layer, tiering.ops.op_builder as builders
from tiering.moe.utils import split_params_into_different_moe_groups_for_optimizer
from tiering.pipe import LayerSpec, PipelineModule
from tiering.runtime.pipe.topology import ProcessTopology
from tiering.checkpoint import DeepSpeedCheckpoint
from tiering.checkpoint.constants import OPTIMIZER_STATE_DICT
from tiering.inference.config import DeepSpeedInferenceConfig
from tiering import OnDevice, init_inference
sys.exit("torch" in sys.modules)
"""


def test_imports_that_a_script_does_not_use_cost_nothing() -> None:
    assert subprocess.run([sys.executable, "-c", SCRIPT]).returncode == 0


def test_every_module_and_public_name_of_deepspeed_can_be_imported() -> None:
    names, absent = RECORDED["names"], RECORDED["absent"]
    assert len(names) > 25 and len(absent) > 300
    real = 0
    for module, public in names.items():
        imported = importlib.import_module(f"tiering.{module}".rstrip("."))
        for name in public:
            real += not isinstance(getattr(imported, name), Unsupported)
    assert real > 80
    for module in absent:
        assert importlib.import_module(f"tiering.{module}").__name__ == f"tiering.{module}"


def test_a_file_is_never_hidden_by_a_placeholder() -> None:
    from tiering.checkpoint import directory

    assert directory.__file__ is not None
    assert deepspeed.runtime.zero.partition_parameters.__file__ is not None
    assert _unsupported.replacement("checkpoint.directory") is None


MoE = importlib.import_module("tiering.moe.layer").MoE

USES: dict[str, Callable[[], object]] = {
    "call": lambda: MoE(8),
    "attribute": lambda: MoE.experts,
    "subclass": lambda: type("Mine", (MoE,), {}),
    "subclass beside a module": lambda: type("Mine", (nn.Module, MoE), {}),
    "truth": lambda: not MoE,
    "comparison": lambda: MoE == "top2",
    "length": lambda: len(MoE),
    "loop": lambda: [*MoE],
    "element": lambda: 1 in MoE,
    "subscript": lambda: MoE[int],
    "the engine's": lambda: deepspeed.DeepSpeedEngine.__getattr__(
        object.__new__(deepspeed.DeepSpeedEngine), "offload_states"
    ),
}


@pytest.mark.parametrize("use", USES)
def test_each_use_is_refused_with_the_replacement(use: str) -> None:
    with pytest.raises(
        UnsupportedNameError, match=r"^\[TIER-NAME\] .* is not supported; .*tiering migrate --table"
    ) as caught:
        USES[use]()
    path = "engine.offload_states" if use == "the engine's" else "moe.layer.MoE"
    assert path in caught.value.message and str(_unsupported.replacement(path)) in caught.value.message
    assert isinstance(caught.value, TieringError) and isinstance(caught.value, AttributeError)


def test_what_does_not_use_a_name_is_no_use() -> None:
    """Annotations, tests of a type, copies, and libraries that look for attributes."""
    assert Optional[MoE] and MoE | None | deepspeed.PipelineModule  # noqa: UP045 # what scripts write
    assert not isinstance(nn.Linear(1, 1), MoE) and not issubclass(nn.Linear, MoE)
    assert copy.deepcopy({"kind": MoE})["kind"] is MoE and {MoE: 1}[MoE] == 1
    assert not hasattr(MoE, "__wrapped__") and not hasattr(MoE, "forward")
    assert repr(MoE) == "<deepspeed.moe.layer.MoE, which tiering does not support>"
    assert deepspeed.zero.DeepSpeedZeRoOffload is deepspeed.zero.DeepSpeedZeRoOffload


@pytest.mark.parametrize(
    ("owner", "name", "hint"),
    [
        ("", "initialise", "; did you mean 'initialize'?"),
        ("utils", "safe_get_full_gard", "; did you mean 'safe_get_full_grad'?"),
        ("ops.adam", "FusedAdm", "; did you mean 'FusedAdam'?"),
        ("", "no_such_thing", ""),
        ("", "_EnginePart", ""),
    ],
)
def test_a_misspelt_name_is_told_and_never_a_private_one(owner: str, name: str, hint: str) -> None:
    module = importlib.import_module(f"tiering.{owner}".rstrip("."))
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'") as caught:
        getattr(module, name)
    assert str(caught.value).endswith(f"'{name}'{hint}")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("tiering.no_such_module")


# The names that are real


def test_values_that_scripts_compare_with() -> None:
    from tiering.constants import TORCH_DISTRIBUTED_DEFAULT_PORT, default_pg_timeout
    from tiering.runtime.zero.config import ZeroStageEnum
    from tiering.runtime.zero.offload_config import OffloadDeviceEnum

    from tiering.config.scheduler import PARAMS
    from tiering.runtime.lr_schedules import VALID_LR_SCHEDULES, WARMUP_LR

    assert sorted(VALID_LR_SCHEDULES) == sorted(PARAMS) and WARMUP_LR == "WarmupLR"
    assert TORCH_DISTRIBUTED_DEFAULT_PORT == 29500 and default_pg_timeout == timedelta(minutes=10)
    assert OffloadDeviceEnum.nvme == "nvme" and ZeroStageEnum.weights == ZeroStageEnum.max_stage == 3


def test_tensors_in_containers() -> None:
    from tiering.checkpoint.utils import clone_tensors_for_torch_save

    from tiering.runtime.utils import move_to_device

    base = torch.arange(8.0, requires_grad=True)
    containers = {"a": [base[:2], (base[2:3], "text")], "b": 7}
    clone = clone_tensors_for_torch_save(containers)
    assert clone["a"][0].tolist() == [0, 1] and clone["a"][1][1] == "text" and clone["b"] == 7
    assert not clone["a"][0].requires_grad and clone["a"][0].untyped_storage().nbytes() == 8
    assert isinstance(clone["a"][1], tuple) and containers["a"][0].untyped_storage().nbytes() == 32  # type: ignore[index,union-attr]

    moved = move_to_device([torch.ones(2), (torch.zeros(1),)], "meta")
    assert moved[0].is_meta and moved[1][0].is_meta and isinstance(moved[1], tuple)
    tensor = torch.ones(2)
    assert move_to_device({"x": tensor}, "cpu", torch.is_tensor)["x"] is tensor


def test_a_configuration_without_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    settings = {
        "train_batch_size": 32,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}},
        "zero_optimization": {"stage": 2},
    }
    config = deepspeed.DeepSpeedConfig(settings)
    assert (config.world_size, config.global_rank, config.train_micro_batch_size_per_gpu) == (4, 1, 4)
    assert (config.bfloat16_enabled, config.fp16_enabled, config.zero_optimization_stage) == (True, False, 2)
    assert (config.optimizer_name, config.optimizer_params["lr"]) == ("adamw", 0.5)
    assert (config.scheduler_name, config.scheduler_params["warmup_num_steps"]) == ("WarmupLR", 7)
    assert config.settings.gradient_clipping == config.gradient_clipping == 1.0
    with pytest.raises(UnsupportedNameError, match=r"no 'pipeline' here; read .*'settings'"):
        _ = config.pipeline
    with pytest.raises(deepspeed.runtime.config.DeepSpeedConfigError, match="gradient_clipping"):
        deepspeed.DeepSpeedConfig(settings | {"gradient_cliping": 1})


@pytest.mark.usefixtures("one_process")
def test_the_group_of_all_ranks() -> None:
    groups = deepspeed.utils.groups
    with pytest.raises(EngineStateError, match="no process group yet"):
        groups.get_data_parallel_group()
    deepspeed.init_distributed()
    assert groups.get_data_parallel_group() is groups._get_data_parallel_group() is dist.group.WORLD
    assert (groups._get_data_parallel_world_size(), groups._get_data_parallel_rank()) == (1, 0)
    assert (groups._get_sequence_parallel_world_size(), groups.get_model_parallel_rank()) == (1, 0)
    groups.initialize(ep_size=1)
    with pytest.raises(ConfigError, match=r"ep_size=2.*leave ep_size at 1"):
        groups.initialize(ep_size=2)
    with pytest.raises(UnsupportedNameError, match="experts"):
        groups._get_expert_parallel_group("ep_size_2")


@pytest.mark.usefixtures("one_process")
def test_collectives_of_the_script_are_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(communication, "_calls", communication.defaultdict(dict))
    deepspeed.init_distributed()
    comm = deepspeed.comm
    for _ in range(3):
        comm.all_reduce(torch.ones(256))
    comm.broadcast(torch.ones(2, dtype=torch.bfloat16), 0)
    tensor = torch.ones(2)
    assert comm.inference_all_reduce(tensor) is tensor
    with caplog.at_level("INFO", logger="tiering"), caplog.at_level("INFO", logger="zero3"):
        summary: Any = comm.log_summary(return_dict=True)
    assert {
        name: {size: row["count"] for size, row in rows.items()} for name, rows in summary["summary"].items()
    } == {
        "all_reduce": {1024: 3},
        "broadcast": {4: 1},
        "barrier": {0: 1},
    }
    row = summary["summary"]["all_reduce"][1024]
    assert row["msg_size_str"] == "1.00 KiB" and row["total_latency_ms"] == 3 * row["avg_latency_ms"] > 0
    assert "all_reduce" in caplog.text and "3 calls" in caplog.text
    assert comm.log_summary() is None
