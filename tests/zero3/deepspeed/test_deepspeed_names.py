"""``import tiering as deepspeed``: the names that scripts use, their parameters and defaults, and what they do."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tiering as deepspeed
from tests.zero3.tutorial import CONFIG, data, net, tutorial
from zero3.deepspeed.engine import DeepSpeedEngine

from .deepspeed_signatures import CALLED, SIGNATURES, module_of, parameters

# Every name of the engine that is promised; properties are without parentheses in scripts.
ENGINE = """
    backward step train eval local_rank global_rank device fp16_enabled bfloat16_enabled zero_optimization_stage
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps is_gradient_accumulation_boundary
    get_global_grad_norm get_lr global_steps save_checkpoint load_checkpoint save_16bit_model no_sync zero_grad module
    get_mom get_type gradient_clipping zero_offload_optimizer zero_optimization wall_clock_breakdown steps_per_print
    dynamic_loss_scale was_step_applied world_size dp_world_size mp_world_size global_samples get_batch_info set_lr
    set_train_batch_size set_gradient_accumulation_boundary module_state_dict deepspeed_io destroy empty_partition_cache
    get_data_parallel_rank loss_scale skipped_steps micro_steps parameters named_parameters named_modules training
"""
OTHERWISE = {
    # what differs from DeepSpeed's, and why
    ("zero.Init", "tensor_overrides"): "its default is DeepSpeed's own enum",
    ("runtime.lr_schedules.OneCycle", "cycle_momentum"): "None is what DeepSpeed does, True insists",
    ("engine.save_16bit_model", "save_filename"): "safetensors, never pickle",
    ("engine.save_fp16_model", "save_filename"): "likewise",
    ("engine.save_checkpoint", "client_state"): "None stands for the empty dict",
}
LEFT_OUT = {"last_batch_iteration"}  # a schedule goes on by load_state_dict
# DeepSpeed's signatures of these are (*args, **kwargs).
WRAPPED = {"engine.backward", "engine.forward", "engine.compile", "comm.barrier"}


def test_every_name_that_was_promised_is_there(start: Callable[..., Any]) -> None:
    for module, names in CALLED.items():
        for name in names:
            assert callable(getattr(module_of("tiering", module), name)), (module, name)
    engine = start()
    assert [name for name in ENGINE.split() if not hasattr(engine, name)] == []
    assert deepspeed.DeepSpeedEngine is deepspeed.runtime.engine.DeepSpeedEngine is type(engine)


def test_parameters_and_defaults_are_deepspeeds() -> None:
    recorded = json.loads(SIGNATURES.read_text(encoding="utf-8"))
    table = {name: (theirs, _named(name)) for name, theirs in recorded["functions"].items()}
    for name, theirs in recorded["engine"].items():
        method = vars(DeepSpeedEngine).get(name) or getattr(DeepSpeedEngine, name, None)
        if method is not None and not isinstance(method, property):
            table[f"engine.{name}"] = theirs, method
    assert len(table) > 80
    wrong = []
    for name, (theirs, function) in table.items():
        if name in WRAPPED:
            continue
        ours = parameters(function)
        for position, (parameter, kind, default) in enumerate(theirs):
            if parameter in LEFT_OUT or (name, parameter) in OTHERWISE:
                continue
            mine = ours[position] if position < len(ours) else None
            if mine != [parameter, kind, default]:
                wrong.append(f"{name}: {parameter} = {default!r}, here {mine}")
    assert wrong == []


def _named(name: str) -> Any:
    module, _, function = name.rpartition(".")
    return getattr(module_of("tiering", module), function)


def test_the_modules_load_no_torch_and_name_nothing_that_is_not_there() -> None:
    """Each module's ``__all__`` is what it resolves, and what type checkers read in its TYPE_CHECKING block."""
    package = Path(deepspeed.__file__).parent
    modules = [path for path in package.rglob("*.py") if "_lazy.names(" in path.read_text(encoding="utf-8")]
    modules = [path for path in modules if path.name not in ("_lazy.py", "_module_finder.py")]
    names = [
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in modules
    ]
    assert len(names) == 26
    code = f"import sys, importlib; [importlib.import_module(n) for n in {names}]; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    for name, path in zip(names, modules, strict=True):
        module = importlib.import_module(name)
        checked = path.read_text(encoding="utf-8").partition("TYPE_CHECKING:")[2].partition("__all__")[0]
        for each in getattr(module, "__all__", ()):
            assert getattr(module, each) is not None and each in dir(module)
            assert each in checked.replace(",", " ").split(), (
                f"{name}.{each} is not in the TYPE_CHECKING block"
            )
        with pytest.raises(AttributeError, match=r"has no attribute '__not_there__'$"):
            module.__not_there__  # noqa: B018 # is what is tried


# The usual script


@pytest.mark.usefixtures("one_process")
def test_the_usual_script_is_the_native_one_to_the_bit(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    losses, state = tutorial(deepspeed, ["--deepspeed", "--deepspeed_config", str(path), "--local_rank", "0"])
    assert dist.get_world_size() == 1, "torch.distributed works in scripts that no launcher has started, too"

    engine, _, loader, _ = deepspeed.initialize(model=net(), config=CONFIG, training_data=data())
    torch.manual_seed(3)
    native = []
    for _ in range(2):
        for x, y in loader:
            loss = nn.functional.cross_entropy(engine(x), y)
            engine.backward(loss)
            engine.step()
            native.append(loss.item())
    assert losses == native and len(losses) == 16
    assert losses[-1] < losses[0]
    assert all(torch.equal(state[name], value) for name, value in engine.master_state_dict().items())
    assert engine.global_steps == 8 and engine.global_samples == 8 * 6
    engine.close()


def test_the_arguments_of_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args([])
    assert (args.deepspeed, args.deepspeed_config) == (False, None)
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "f.json", "--deepscale_config", "g.json"])
    assert (args.deepspeed, args.deepspeed_config, args.deepscale_config) == (True, "f.json", "g.json")
    parser.print_help()
    assert (
        "--deepspeed_config FILE" in (help_text := capsys.readouterr().out) and "deepscale" not in help_text
    )
