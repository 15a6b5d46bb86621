"""Programs that import deepspeed run on the engine, and report what they report without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .programs import ENVIRONMENT, output_of


def run(function: str, *arguments: str) -> Any:
    output = output_of("-m", "tests.tiering.integrations.under_shim", function, *arguments)
    return json.loads(output.splitlines()[-1])


def test_the_name_is_that_of_tiering_until_it_is_uninstalled() -> None:
    seen = run("names")
    assert seen["same"] == [True, "tiering.comm", True, True]
    assert seen["found"] == [True, True]
    assert seen["mapping"] == ["deepspeed"]
    assert seen["versions"] == ["0.19.8"] * 3
    assert "[TIER-NAME] deepspeed.moe.layer.MoE is not supported; use an ordinary model" in seen["use"]
    left, spec, path = seen["uninstalled"]
    assert left == []
    assert spec is None
    assert path == ENVIRONMENT["PYTHONPATH"]


@pytest.mark.slow
def test_install_refuses_what_is_too_late() -> None:
    assert "after accelerate, which found no DeepSpeed" in run("early")
    code = (
        "import sys, types; sys.modules['deepspeed'] = types.ModuleType('deepspeed')\n"
        "from tiering.integrations import deepspeed; deepspeed.install()"
    )
    ran = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True)
    assert "[TIER-STATE] install() was called after deepspeed was imported" in ran.stderr


@pytest.mark.slow
def test_a_loop_of_accelerate_and_a_trainer_in_one_process(tmp_path: Path) -> None:
    seen = run("loop_and_trainer", str(tmp_path))
    check_loop(seen["loop"])
    check_trainer(seen["trainer"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "stage", "options"),
    [("nvme", "3", ()), ("device", "2", ()), ("cpu", "2", ("optimizer",)), ("nvme", "3", ("optimizer",))],
)
def test_a_trainer_with_deepspeed(place: str, stage: str, options: tuple[str, ...], tmp_path: Path) -> None:
    check_trainer(run("trainer", place, stage, str(tmp_path), *options), *options)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["3", "2"])
def test_a_loop_of_accelerate_with_deepspeed(stage: str, tmp_path: Path) -> None:
    check_loop(run("loop", stage, str(tmp_path)))


def check_trainer(seen: Any, *options: str) -> None:
    """The engine reports what the stock trainer reports, and what it saved is what a resumed run goes on from."""
    assert len(seen["reports"]) == 22
    for ours, theirs in zip(seen["reports"], seen["stock"], strict=True):
        if options and "loss" in ours:
            # As with DeepSpeed, the engine has stepped the schedule before transformers reports the rate.
            ours["learning_rate"] = theirs["learning_rate"]
        assert ours == pytest.approx(theirs, rel=1e-6)
    assert seen["resumed"] == []
    assert seen["type"] == "DeepSpeedEngine"


def check_loop(seen: Any) -> None:
    """The engine reports what the loop reports without it."""
    assert seen["type"] == "DeepSpeedEngine"
    for (loss, norm, _), (expected, other, _) in zip(seen["reports"], seen["stock"], strict=True):
        assert (loss, norm) == pytest.approx((expected, other), rel=1e-6)


PROGRAM = """
import sys
from torch.utils.data import DataLoader
import torch, deepspeed
from accelerate import Accelerator
accelerator = Accelerator()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(torch.ones(8, 4), batch_size=2))
for batch in loader:
    loss = model(batch).square().mean()
    accelerator.backward(loss)
    optimizer.step()
counted = accelerator.num_processes, len(loader), type(model).__name__
accelerator.print("ended", *counted, model.world_size, model.zero_optimization_stage(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_processes_of_a_launcher_find_the_name(processes: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}'
    )
    (tmp_path / "launch.yaml").write_text(
        f"distributed_type: DEEPSPEED\nnum_processes: {processes}\nnum_machines: 1\nmachine_rank: 0\n"
        f"main_process_port: 0\ndeepspeed_config:\n  deepspeed_config_file: {tmp_path}/ds.json\n"
        "  zero3_init_flag: false\n"
    )
    command = [
        *("-m", "tiering.integrations.deepspeed"),
        *("-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "launch.yaml")),
        str(tmp_path / "train.py"),
    ]
    output = output_of(*command, directory=tmp_path)
    assert f"ended {processes} {4 // processes} DeepSpeedEngine {processes} 3" in output
