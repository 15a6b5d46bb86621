"""``import tiering as deepspeed``: the names that scripts use, their parameters and defaults, and what they do."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tiering as deepspeed
from tiering.errors import CheckpointError, ConfigError, EngineStateError, ResidencyError
from tiering.weights.files import open_weights
from zero3.deepspeed import distributed
from zero3.engine import Engine

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
WRAPPED = {
    "engine.backward",
    "engine.forward",
    "engine.compile",
    "comm.barrier",
}  # DeepSpeed's show *args, **kwargs


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher; a process group that the test makes is gone afterwards, and so are variables."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # which remembers what it was
        monkeypatch.delenv(name)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


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
        method = vars(Engine).get(name) or getattr(Engine, name, None)
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
    modules = [path for path in package.rglob("*.py") if "lazy.names(" in path.read_text(encoding="utf-8")]
    modules = [path for path in modules if path.name != "lazy.py"]
    names = [
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in modules
    ]
    assert len(names) == 21
    code = f"import sys, importlib; [importlib.import_module(n) for n in {names}]; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    for name, path in zip(names, modules, strict=True):
        module = importlib.import_module(name)
        checked = path.read_text(encoding="utf-8").partition("TYPE_CHECKING:")[2].partition("__all__")[0]
        for each in module.__all__:
            assert getattr(module, each) is not None and each in dir(module)
            assert each in checked.replace(",", " ").split(), (
                f"{name}.{each} is not in the TYPE_CHECKING block"
            )
        with pytest.raises(AttributeError, match=r"not_there.*migrate-from-deepspeed\.md lists"):
            module.not_there  # noqa: B018 # is what is tried


# The usual script


WIDTH = 12


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(24, WIDTH, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def net() -> nn.Module:
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


CONFIG = {
    "train_micro_batch_size_per_gpu": 3,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "betas": [0.8, 0.999], "weight_decay": 3e-3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "tiering": {"telemetry": {"enabled": False}},
}


def tutorial(deepspeed: Any, arguments: list[str]) -> tuple[list[float], dict[str, Tensor]]:
    """A training script as DeepSpeed's tutorial has it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    args = deepspeed.add_config_arguments(parser).parse_args(arguments)
    deepspeed.init_distributed()
    model = net()
    parameters = filter(lambda p: p.requires_grad, model.parameters())
    model_engine, _, trainloader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=parameters, training_data=data()
    )
    torch.manual_seed(3)
    criterion, losses = nn.CrossEntropyLoss(), []
    for _ in range(2):
        for batch in trainloader:
            inputs, labels = (each.to(model_engine.device) for each in batch)
            if model_engine.fp16_enabled():
                inputs = inputs.half()
            loss = criterion(model_engine(inputs), labels)
            model_engine.backward(loss)
            model_engine.step()
            losses.append(loss.item())
    state = model_engine.master_state_dict()
    model_engine.destroy()
    return losses, state


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


# Ranks


LAUNCHERS = [
    (
        {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
        | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
        "3 4 3 4 127.0.0.1 29501",
    ),
    ({"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "head", "MASTER_PORT": "7"}, "1 2 - - head 7"),
    (
        {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}
        | {"SLURM_STEP_NODELIST": "gpu[003-006,9],old7"},
        "5 8 1 - gpu003 29501",
    ),
    (
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "a-1,b[2-3]"},
        "0 2 - - a-1 29501",
    ),
    (  # srun --mpi=pmi2 sets both
        {"PMI_RANK": "1", "PMI_SIZE": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n1"}
        | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"},
        "1 2 1 - n1 29501",
    ),
    (  # mpiexec starts one of its own by srun on each node
        {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "SLURM_STEP_NUM_TASKS": "2"}
        | {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "n[1-2]"},
        "5 8 1 - n1 29501",
    ),
    (
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NODELIST": "n1"},
        "- - - - - -",
    ),  # the batch script
    (
        {"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "9"},
        "1 2 - - - -",
    ),  # torchrun
]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("given", "wanted"), LAUNCHERS, ids=range(len(LAUNCHERS)))
def test_a_launcher_that_is_not_torchrun_is_understood(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], wanted: str
) -> None:
    for name in (name for names in distributed._LAUNCHERS.values() for name in names if name):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    distributed.discover(29501, verbose=False)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert " ".join(os.environ.get(name, "-") for name in names) == wanted


@pytest.mark.usefixtures("one_process")
def test_nothing_says_where_rank_0_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(ConfigError, match=r"MPICH has started 2 processes.*MASTER_ADDR"):
        deepspeed.init_distributed()


@pytest.mark.usefixtures("one_process")
def test_one_process_without_a_launcher() -> None:
    comm = deepspeed.comm
    assert (comm.get_rank(), comm.get_world_size(), comm.get_local_rank(), comm.barrier()) == (0, 1, 0, None)
    with pytest.raises(ConfigError, match=r"dist_init_required=False.*has none"):
        deepspeed.init_distributed(dist_init_required=False)
    deepspeed.init_distributed(
        dist_backend="nccl", dist_init_required=True
    )  # which a machine without a GPU has not
    deepspeed.init_distributed()
    deepspeed.init_distributed(dist_init_required=False)
    value = torch.tensor([2.0])
    comm.all_reduce(value)  # torch.distributed's
    comm.barrier()
    assert (value.item(), comm.get_rank(), comm.get_world_size(), dist.get_backend()) == (2.0, 0, 1, "gloo")
    assert comm.is_initialized() and comm.ReduceOp.SUM is dist.ReduceOp.SUM


# Parameters


def test_a_model_built_by_init_as_scripts_ask_for_it() -> None:
    with deepspeed.zero.Init(enabled=False):
        plain = nn.Linear(3, 3)
    assert plain.weight.isfinite().all()
    before = torch.get_default_dtype()
    with deepspeed.zero.Init(
        remote_device="cpu", pin_memory=True, dtype=torch.bfloat16, config_dict_or_path={}
    ):
        half = nn.Linear(3, 3)
    assert half.weight.dtype is torch.bfloat16 and torch.get_default_dtype() is before
    with pytest.raises(ConfigError, match="no dtype of parameters"):
        deepspeed.zero.Init(dtype=torch.int8)
    with pytest.raises(ConfigError, match="would round the weights"):
        deepspeed.zero.Init(zero_quantized_weights=True)


def test_values_are_read_and_set_before_initialize(start: Callable[..., Any]) -> None:
    torch.manual_seed(1)
    plain = nn.Linear(4, 3)
    torch.manual_seed(1)
    with deepspeed.zero.Init():
        model = nn.Linear(4, 3)
    gathered = deepspeed.zero.GatheredParameters
    with gathered(model):
        assert torch.equal(model.weight, plain.weight)
        with pytest.raises(EngineStateError, match="gathered already"), gathered(model.weight):
            pass
    with (
        pytest.raises(EngineStateError, match="changed without modify"),
        gathered([model.weight]),
        torch.no_grad(),
    ):
        model.weight.zero_()
    with pytest.raises(ResidencyError):
        model.weight + 1
    with gathered(model.weight, modifier_rank=0):
        assert torch.equal(model.weight, plain.weight), "the change was dropped"
        nn.init.constant_(model.weight, 0.5)
    assert (model.weight == 0.5).all()
    engine = start(model, precision="fp32")
    assert (engine.get_fp32_parameter("weight") == 0.5).all()
    assert torch.equal(engine.get_fp32_parameter("bias"), plain.bias)


def test_values_are_read_and_set_while_an_engine_has_them(start: Callable[..., Any]) -> None:
    engine = start(offload_param="nvme", cache_in_host=False, threshold=0)
    weight, gathered = engine.module.blocks[0].up.weight, deepspeed.zero.GatheredParameters
    deepspeed.zero.register_external_parameter(engine.module, weight)
    with pytest.raises(ConfigError, match="not Tensor and SmallModel"):
        deepspeed.zero.register_external_parameter(engine.module, torch.ones(1))
    with gathered([weight], modifier_rank=0), torch.no_grad():
        weight.fill_(0.25)
    with gathered(engine.module.parameters()):
        assert (weight == 0.25).all()
    with gathered(weight, modifier_rank=0, enabled=False), pytest.raises(ResidencyError):
        weight + 1
    with (
        pytest.raises(ConfigError, match="modifier_rank 1, but the ranks are 0 to 0"),
        gathered(weight, modifier_rank=1),
    ):
        pass


def test_state_by_parameter(start: Callable[..., Any], micro_batches: Callable[..., Any]) -> None:
    utils, engine = deepspeed.utils, start(accumulation=1)
    name, param = "blocks.1.down.weight", engine.module.blocks[1].down.weight
    assert utils.safe_get_full_grad(param) is None
    engine.backward(engine(*next(micro_batches(1))))
    assert torch.equal(utils.safe_get_full_grad(param), engine.get_fp32_gradient(name))
    utils.safe_set_full_grad(param, torch.ones(param.shape))
    engine.step()
    assert torch.equal(utils.safe_get_full_fp32_param(param), engine.get_fp32_parameter(name))
    moment = utils.safe_get_full_optimizer_state(param, "exp_avg")
    assert moment.unique().numel() == 1, "the gradient that was set is what the step used"
    utils.safe_set_full_optimizer_state(param, moment * 0, "exp_avg")
    utils.safe_set_full_fp32_param(param, moment * 0 + 2)
    assert not engine.get_fp32_state(name, "exp_avg").any() and (engine.get_fp32_parameter(name) == 2).all()
    with pytest.raises(ConfigError, match="belongs to no engine"):
        utils.safe_get_full_grad(nn.Parameter(torch.ones(2)))


def test_frozen_parameters_have_no_state(start: Callable[..., Any], small_model: type[nn.Module]) -> None:
    model = small_model()
    frozen = model.position.weight.requires_grad_(False)
    start(model)
    assert deepspeed.utils.safe_get_full_grad(frozen) is None
    assert deepspeed.utils.safe_get_full_optimizer_state(frozen, "exp_avg") is None
    assert deepspeed.utils.safe_get_full_fp32_param(frozen).shape == frozen.shape


def test_the_weights_of_a_checkpoint_without_an_engine(
    start: Callable[..., Any], small_model: type[nn.Module], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tools, model = deepspeed.utils.zero_to_fp32, small_model()
    model.register_buffer("seen", torch.tensor([3, 4]))
    model.position.weight.requires_grad_(False)
    engine = start(model)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        tools.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved")
    engine.save_checkpoint(tmp_path / "saved")
    wanted = {name: engine.get_fp32_parameter(name) for name, _ in model.named_parameters()}
    state = tools.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved", tag="global_step0")
    assert state.keys() == {*wanted, "seen", "head.weight"}
    assert torch.equal(state.pop("seen"), torch.tensor([3, 4]))
    assert state["head.weight"] is state["embedding.weight"], "once in memory"
    assert {value.dtype for value in state.values()} == {torch.float32}, "what is frozen is kept in bf16"
    small_model().load_state_dict(state)
    assert all(torch.equal(state[name], value) for name, value in wanted.items())
    trained = tools.get_fp32_state_dict_from_zero_checkpoint(
        tmp_path / "saved", exclude_frozen_parameters=True
    )
    assert set(state) - set(trained) == {"position.weight"}
    trained.pop("head.weight")
    plain = small_model()
    plain.more = nn.Linear(1, 1)
    assert tools.load_state_dict_from_zero_checkpoint(plain, tmp_path / "saved") is plain
    assert all(torch.equal(plain.get_parameter(name), value) for name, value in wanted.items())
    assert "keeps its own more.weight, more.bias, and has no seen" in caplog.text
    with pytest.raises(
        CheckpointError, match=r"no tensor of this DataParallel: .*the model module\.embedding"
    ):
        tools.load_state_dict_from_zero_checkpoint(nn.DataParallel(plain), tmp_path / "saved")
    engine.save_checkpoint(tmp_path / "trained alone", exclude_frozen_parameters=True)
    caplog.clear()
    del plain.more
    plain.register_buffer("seen", model.seen)
    tools.load_state_dict_from_zero_checkpoint(plain, tmp_path / "trained alone")
    assert "differ" not in caplog.text, "what the save has excluded is no surprise"
    tools.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "saved", tmp_path / "out", "1GB")
    tools.convert_zero_checkpoint_to_fp32_state_dict(
        tmp_path / "saved", tmp_path / "trained", exclude_frozen_parameters=True
    )
    assert open_weights(tmp_path / "trained").tensors.keys() == trained.keys()
    engine.close()
    again = start(small_model(), weights=tmp_path / "out", strict=False, precision="fp32")
    assert torch.equal(again.get_fp32_parameter("norm.weight"), wanted["norm.weight"])
    with pytest.raises(ConfigError, match="max_shard_size"):
        tools.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "saved", tmp_path / "out", "much")


def test_leaf_modules_are_one_group(start: Callable[..., Any], small_model: type[nn.Module]) -> None:
    utils, model = deepspeed.utils, small_model()
    with pytest.raises(ConfigError, match="no module of class Conv2d, Expert"):
        utils.set_z3_leaf_modules(model, [nn.Conv2d, "Expert"])
    kind = type(model)
    assert utils.set_z3_leaf_modules(model, [kind]) == [model] == utils.get_z3_leaf_modules(model)
    assert utils.z3_leaf_module(model) and not utils.z3_leaf_module(model.norm)
    whole = len(start(model, threshold=0)._groups)
    other = small_model()
    utils.set_z3_leaf_modules(other, ["SmallModel"])
    utils.unset_z3_leaf_modules(other, [kind])
    assert whole == 1 < len(start(other, threshold=0)._groups)


# Optimizers


ADAM = {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.1}
OPTIMIZERS = [
    ("adam", "DeepSpeedCPUAdam", "AdamW", {}, ADAM),
    ("adam", "DeepSpeedCPUAdam", "Adam", {"adamw_mode": False}, ADAM),
    ("adam", "FusedAdam", "AdamW", {}, ADAM),
    ("adam", "FusedAdam", "Adam", {"adam_w_mode": False, "set_grad_none": False}, ADAM),
    ("lion", "DeepSpeedCPULion", "Lion", {}, {"lr": 0.01, "weight_decay": 0.1}),
    ("lion", "FusedLion", "Lion", {"set_grad_none": False}, {"lr": 0.01, "weight_decay": 0.1}),
    ("adagrad", "DeepSpeedCPUAdagrad", "Adagrad", {}, {"lr": 0.01, "weight_decay": 0.1}),
]


def steps(engine: Any, count: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    for _ in range(count):
        engine.backward(engine(torch.randn(4, WIDTH, generator=generator)).pow(2).mean())
        engine.step()
    state: dict[str, Tensor] = engine.master_state_dict()
    return state


@pytest.mark.parametrize(("module", "name", "named", "mode", "options"), OPTIMIZERS)
def test_an_optimizer_that_is_given_is_the_one_that_is_named(
    start: Callable[..., Any],
    module: str,
    name: str,
    named: str,
    mode: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Taken over, and stepping by itself."""
    kind = getattr(module_of("tiering", f"ops.{module}"), name)
    model, alone = net(), net()
    common: dict[str, Any] = {"precision": "fp32", "accumulation": 1, "clip": 0.0}
    engine = start(model, client=kind(model.parameters(), **mode, **options), rule=None, **common)
    assert engine.optimizer_name() == name and len(engine.get_mom()) == 1
    given = steps(engine)
    if named == "Adam":  # which DeepSpeed reads as AdamW, unless
        options = options | {"adam_w_mode": False}
    wanted = steps(start(net(), rule=named, optimizer=options, **common))
    assert [name for name in wanted if not torch.equal(wanted[name], given[name])] == []

    optimizer = kind(
        alone.parameters(), **mode, **{key: options[key] for key in options if key != "adam_w_mode"}
    )
    if isinstance(
        optimizer, torch.optim.Adam
    ):  # whose own step is torch's, and loads a compiler for two seconds
        next(alone.parameters()).grad = torch.ones(32, WIDTH)
        optimizer.zero_grad()
        assert (next(alone.parameters()).grad is None) is mode.get("set_grad_none", True)
        return
    generator = torch.Generator().manual_seed(2)
    for _ in range(2):
        alone(torch.randn(4, WIDTH, generator=generator)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, param in alone.named_parameters():
        assert (param - wanted[name]).abs().max() < 1e-6, name


def test_options_of_optimizers_that_nothing_does_are_refused() -> None:
    params = [nn.Parameter(torch.ones(2))]
    adam = deepspeed.ops.adam
    for kind in (adam.DeepSpeedCPUAdam, adam.FusedAdam):
        with pytest.raises(ConfigError, match=rf"{kind.__name__}\(amsgrad=True\)"):
            kind(params, amsgrad=True)
        with pytest.raises(ConfigError, match="bias_correction=False"):
            kind(params, bias_correction=False)
    for kind in (
        adam.DeepSpeedCPUAdam,
        deepspeed.ops.lion.DeepSpeedCPULion,
        deepspeed.ops.adagrad.DeepSpeedCPUAdagrad,
    ):
        with pytest.raises(ConfigError, match='"state": "bf16"'):
            kind(params, fp32_optimizer_states=False)


# Activations, the device, what is said


def test_a_checkpointed_function_gives_the_same_and_is_computed_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpointing, runs = deepspeed.checkpointing, list[int]()
    weight = torch.randn(4, 4, requires_grad=True)

    def function(x: Tensor, *, scale: float = 1.0) -> Tensor:
        runs.append(1)
        return torch.dropout(x @ weight, 0.5, train=True) * scale

    gradients = []
    for call in (function, lambda *args, **kwargs: checkpointing.checkpoint(function, *args, **kwargs)):
        torch.manual_seed(4)
        call(torch.ones(2, 4), scale=3.0).sum().backward()  # an input that requires no gradient
        gradients.append(weight.grad.clone())
        weight.grad = None
    assert torch.equal(*gradients) and len(runs) == 3
    with caplog.at_level(logging.INFO, "zero3"):
        checkpointing.configure(
            None, deepspeed_config=None, partition_activations=True, checkpoint_in_cpu=True
        )
        checkpointing.configure(None, partition_activations=True)
    assert checkpointing.is_configured()
    assert caplog.text.count("partition_activations, checkpoint_in_cpu: no effect here") == 1
    checkpointing.reset()


def test_the_accelerator_answers_on_a_machine_without_a_gpu() -> None:
    cpu = deepspeed.get_accelerator.__wrapped__()  # not the one that was made first, perhaps for a GPU
    assert (cpu.device_name(), cpu.device_name(0), cpu.current_device_name()) == ("cpu", "cpu", "cpu")
    assert cpu.device_count() == 1 and cpu.is_available() and cpu.communication_backend_name() == "gloo"
    assert cpu.is_bf16_supported() and cpu.is_fp16_supported() and torch.bfloat16 in cpu.supported_dtypes()
    cpu.set_device(0)
    cpu.synchronize()
    cpu.empty_cache()
    cpu.reset_peak_memory_stats()
    assert cpu.memory_allocated() == cpu.max_memory_allocated() == cpu.memory_reserved(0) == 0
    assert 0 < cpu.available_memory() <= cpu.total_memory()
    cpu.manual_seed_all(5)
    first = torch.rand(3)
    cpu.random().manual_seed(5)
    assert torch.equal(first, torch.rand(3))
    tensor = torch.ones(2, device=cpu.current_device())
    assert cpu.on_accelerator(tensor) and cpu.pin_memory(tensor) is tensor and not cpu.is_pinned(tensor)
    with cpu.device(0), cpu.stream(cpu.default_stream()):
        assert cpu.LongTensor([1, 2]).dtype is torch.int64
    with pytest.raises(AttributeError, match="no attribute 'memory_alocated'"):
        cpu.memory_alocated  # noqa: B018 # is what is tried


def test_what_scripts_say_goes_through_our_logger(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tiering"):
        deepspeed.log_dist("to all", ranks=[-1])
        deepspeed.utils.log_dist("to one", ranks=[1])
        deepspeed.utils.logger.info("plain")
        deepspeed.runtime.utils.see_memory_usage("before", force=True)
        deepspeed.runtime.utils.see_memory_usage("never")
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "to all",
        "plain",
        "before",
    ]
    assert "GiB" in caplog.text


# The engine


def test_what_an_engine_answers(start: Callable[..., Any]) -> None:
    engine = start(
        precision="fp16", accumulation=3, clip=0.5, offload_optimizer="cpu", fp16={"initial_scale_power": 4}
    )
    assert (engine.local_rank, engine.global_rank, engine.world_size, engine.dp_world_size) == (0, 0, 1, 1)
    assert (engine.mp_world_size, engine.get_data_parallel_rank(), engine.get_model_parallel_rank()) == (
        1,
        0,
        0,
    )
    assert (
        engine.get_batch_info()
        == (6, 2, 3)
        == (engine.train_batch_size(), 2, engine.gradient_accumulation_steps())
    )
    assert (engine.fp16_enabled(), engine.bfloat16_enabled(), engine.torch_autocast_enabled()) == (
        True,
        False,
        False,
    )
    assert (engine.loss_scale(), engine.dynamic_loss_scale(), engine.gradient_clipping()) == (16.0, True, 0.5)
    assert engine.zero_optimization() and engine.zero_optimization_stage() == 3
    assert engine.zero_optimization_partition_gradients() and engine.zero_optimization_partition_weights()
    assert engine.zero_cpu_offload() and engine.zero_offload_optimizer().device == "cpu"
    assert engine.zero_offload_param() is None and engine.torch_autocast_dtype() is None
    assert (engine.steps_per_print(), engine.wall_clock_breakdown(), engine.dataloader_drop_last()) == (
        None,
        False,
        False,
    )
    assert (engine.optimizer_name(), engine.scheduler_name()) == ("AdamW", None)
    assert (engine.get_lr(), engine.get_mom(), engine.get_type()) == ([1e-3], [(0.9, 0.999)], [0.0])
    engine.set_lr(0.5)
    assert engine.get_lr() == [0.5] and engine.global_samples == 0
    state = engine.module_state_dict(prefix="net.")
    assert {name.removeprefix("net.") for name in state} == set(engine.state_dict())
    engine.module.position.weight.requires_grad_(False)
    assert set(state) - set(engine.module_state_dict(prefix="net.", exclude_frozen_parameters=True)) == {
        "net.position.weight"
    }


def test_an_engine_stands_for_its_module(start: Callable[..., Any]) -> None:
    engine = start()
    assert dict(engine.named_parameters()).keys() == dict(engine.module.named_parameters()).keys()
    assert engine.training and not engine.eval().training and engine.blocks is engine.module.blocks
    with pytest.raises(AttributeError, match="training"):
        engine.training = True  # which would leave the module as it is
    with pytest.raises(
        AttributeError, match="its SmallModel has an attribute 'get_global_grad_nrom'; did you mean"
    ):
        engine.get_global_grad_nrom()
    with pytest.raises(AttributeError, match="'_blocks'"):
        engine._blocks  # noqa: B018 # is what is tried
    engine.module._no_split_modules = ["Block"]
    assert engine._no_split_modules == ["Block"], "trainers ask for such names"
    engine.module.__array__ = 1
    assert not hasattr(engine, "__array__"), "what Python and others look for is the engine's"
    with pytest.raises(EngineStateError, match="compile its blocks"):
        engine.compile()

    class Broken(Engine):
        @property
        def training(self) -> bool:
            return self.module.norm.nothing

    engine.__class__ = Broken
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):  # and not: of no attribute 'training'
        engine.training  # noqa: B018 # is what is tried


def test_a_script_that_says_itself_where_an_update_is(
    start: Callable[..., Any], micro_batches: Callable[..., Any]
) -> None:
    """Bit for bit as one that lets the engine count; step() at each micro-batch, or only at the last."""

    def run(says: bool, each: bool) -> tuple[dict[str, Tensor], list[bool]]:
        engine, applied = start(accumulation=3), []
        for number, batch in enumerate(micro_batches(6), 1):
            last = number % 3 == 0
            if says:
                engine.set_gradient_accumulation_boundary(last)
            assert engine.is_gradient_accumulation_boundary() is last
            engine.backward(engine(*batch))
            if each or last:
                engine.step()
                applied.append(engine.was_step_applied())
        assert engine.global_steps == 2
        return engine.master_state_dict(), applied

    counted, applied = run(says=False, each=True)
    assert applied == [False, False, True] * 2
    for each in (True, False):
        said, _ = run(says=True, each=each)
        assert all(torch.equal(counted[name], said[name]) for name in counted)


def test_a_boundary_that_comes_early_leaves_nothing_waiting(
    start: Callable[..., Any], micro_batches: Callable[..., Any], tmp_path: Path
) -> None:
    engine = start(accumulation=3)
    first, second, third = micro_batches(3)
    engine.backward(engine(*first))
    engine.step()
    with pytest.raises(EngineStateError, match="no step has used"):
        engine.save_checkpoint(tmp_path)
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(*second))
    engine.step()
    assert engine.was_step_applied() and engine.micro_steps == 2
    engine.save_checkpoint(tmp_path)
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(engine(*third))
    engine.step()
    assert not engine.was_step_applied() and engine.global_steps == 1


def test_another_batch_size(
    start: Callable[..., Any], micro_batches: Callable[..., Any], tmp_path: Path
) -> None:
    """As an engine that had it from the start."""

    def train(engine: Any, batches: list[Any]) -> None:
        for batch in batches:
            engine.backward(engine(*batch))
            engine.step()

    batches = list(micro_batches(6))
    changed, other = start(accumulation=2), start(accumulation=2)
    train(changed, batches[:2])
    train(other, batches[:2])
    changed.set_train_batch_size(8)
    assert changed.get_batch_info() == (8, 2, 4)
    train(changed, batches[2:])
    assert (changed.global_steps, changed.global_samples) == (2, 4 + 8)
    changed.save_checkpoint(tmp_path)
    resumed = start(accumulation=2)
    resumed.load_checkpoint(tmp_path)
    assert resumed.global_samples == 4 + 8
    with other.no_sync():
        for batch in batches[2:5]:
            other.backward(other(*batch) / 4, scale_wrt_gas=False)
    other.set_gradient_accumulation_boundary(True)
    other.backward(other(*batches[5]) / 4, scale_wrt_gas=False)
    other.step()
    one, two = changed.master_state_dict(), other.master_state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    with pytest.raises(ConfigError, match="is 2 samples; give a multiple"):
        changed.set_train_batch_size(7)
    with pytest.raises(ConfigError, match="grad_accum_dtype"):
        changed.set_train_batch_size(2)
    train(changed, batches[:1])
    with pytest.raises(EngineStateError, match="no step has used"):
        changed.set_train_batch_size(4)


def test_step_gives_the_schedule_what_it_is_told(
    start: Callable[..., Any], micro_batches: Callable[..., Any]
) -> None:
    engine = start(accumulation=1)
    told: list[Any] = []

    class Schedule(torch.optim.lr_scheduler.LambdaLR):
        def step(self, *args: Any, **kwargs: Any) -> None:
            told.append(kwargs)

    engine.lr_scheduler = Schedule(engine.optimizer, lambda _: 1.0)
    told.clear()
    for options in ({}, {"lr_kwargs": {"epoch": 3}}):
        engine.backward(engine(*next(micro_batches(1))))
        engine.step(**options)
    assert told == [{}, {"epoch": 3}]


def test_a_loader_of_an_engine(start: Callable[..., Any]) -> None:
    engine = start()
    dataset = TensorDataset(torch.arange(7))
    sizes = [len(batch[0]) for batch in engine.deepspeed_io(dataset)]
    assert sizes == [2, 2, 2, 1]
    order = [int(x) for (batch,) in engine.deepspeed_io(dataset, batch_size=3, route="eval") for x in batch]
    assert order == list(range(7))
    sampler = torch.utils.data.SequentialSampler(range(3))
    (batch,) = engine.deepspeed_io(dataset, 4, data_sampler=sampler, collate_fn=lambda items: len(items))
    assert batch == 3
    engine.collate_fn = len
    assert [*engine.deepspeed_io(dataset)] == [2, 2, 2, 1]
    engine.config = engine.config.model_copy(update={"dataloader_drop_last": True})
    assert [*engine.deepspeed_io(dataset)] == [*engine.deepspeed_io(dataset, route="eval")] == [2, 2, 2]
    with pytest.raises(ConfigError, match="'test'; use 'train'"):
        engine.deepspeed_io(dataset, route="test")


def test_a_loss_that_the_engine_was_not_told_is_not_that_of_an_earlier_step(
    start: Callable[..., Any], micro_batches: Callable[..., Any]
) -> None:
    engine = start(accumulation=1)
    first, second = micro_batches(2)
    told = engine(*first)
    engine.backward(told)
    engine.step()
    assert engine.snapshot().loss == told.item()
    engine(*second).backward()
    engine.step()
    assert engine.snapshot().loss is None
