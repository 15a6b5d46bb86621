"""How a DeepSpeed file says what is trained with: optimizer, schedule, precision, autocast, loss scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tiering.config.ds_config import KeyVerdict, examine, load
from tiering.config.ds_config.known_keys import KEYS
from tiering.config.ds_config.type_params import PARAMS_BY_TYPE
from tiering.config.optimizer import RULES
from tiering.config.scheduler import PARAMS
from tiering.config.training import LossScaleConfig, OffloadOptimizerConfig, OptimizerConfig, TieringConfig


def read(**sections: Any) -> TieringConfig:
    return load({"train_batch_size": 1} | sections)[0]


def verdicts(**sections: Any) -> dict[str, tuple[KeyVerdict, str]]:
    report = load({"train_batch_size": 1} | sections)[1]
    return {entry.key: (entry.verdict, entry.note) for entry in report.entries}


def refused(**sections: Any) -> dict[str, str]:
    config, report = examine({"train_batch_size": 1} | sections)
    assert config is None
    return {entry.key: entry.note for entry in report.refused}


def optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"type": kind, "params": params}


# Optimizers


@pytest.mark.parametrize("kind", sorted(RULES))
def test_a_rule_by_its_name_in_any_case(kind: str) -> None:
    for name in (kind, kind.lower(), kind.upper()):
        assert read(optimizer={"type": name}).optimizer == OptimizerConfig.model_validate({"type": kind})


@pytest.mark.parametrize(
    ("kind", "params", "fields"),
    [
        ("Lion", {"lr": 1e-4, "betas": [0.9, 0.99], "weight_decay": 0.3}, {"betas": (0.9, 0.99)}),
        ("Adagrad", {"lr": 0.5, "lr_decay": 0.1, "initial_accumulator_value": 0.2}, {"lr_decay": 0.1}),
        ("SGD", {"momentum": 0.9, "dampening": 0.0, "nesterov": True}, {"nesterov": True}),
        ("Adam", {"eps": 1e-6, "adam_w_mode": False}, {"eps": 1e-6, "decoupled": False}),
    ],
)
def test_the_numbers_of_a_rule(kind: str, params: dict[str, Any], fields: dict[str, Any]) -> None:
    config = read(optimizer=optimizer(kind, **params)).optimizer
    assert config is not None
    renamed = {"adam_w_mode": "decoupled"}
    expected = {renamed.get(name, name): value for name, value in params.items()} | fields
    assert config == OptimizerConfig.model_validate({"type": kind} | expected)
    assert {name: getattr(config, name) for name in fields} == fields


@pytest.mark.parametrize("section", [None, {}, {"type": None}])
def test_without_an_optimizer_there_is_none(section: object) -> None:
    assert read(optimizer=section).optimizer is None
    assert read().optimizer is None


def test_numbers_without_a_rule_are_refused() -> None:
    assert refused(optimizer={"params": {"lr": 0.1}}) == {
        "optimizer.type": "missing; set it, for example 'AdamW'"
    }


@pytest.mark.parametrize("kind", sorted(RULES))
def test_a_key_that_a_rule_does_not_have_is_named(kind: str) -> None:
    prefix = "optimizer.params."
    for key in (key for key in KEYS if key.startswith(prefix)):
        name = key.removeprefix(prefix)
        _, report = examine({"train_batch_size": 1, "optimizer": optimizer(kind, **{name: 0.5})})
        note = {entry.key: entry.note for entry in report.refused}.get(key, "")
        assert note.startswith(f"{kind} has no {name}; it has lr, ") == (
            name not in PARAMS_BY_TYPE["optimizer"][kind]
        )


def test_the_parameters_of_a_rule_are_those_of_torch() -> None:
    for kind in ("SGD", "Adagrad", "AdamW"):
        defaults = getattr(torch.optim, kind)([torch.nn.Parameter(torch.zeros(1))]).defaults
        # adam_w_mode, torch_adam and the like are DeepSpeed's own
        own = {"adam_w_mode", "torch_adam", "bias_correction", "set_grad_none", "fp32_optimizer_states"}
        own |= {"max_grad_norm", "amsgrad"} if kind == "Adagrad" else {"max_grad_norm"}
        parameters = set(PARAMS_BY_TYPE["optimizer"][kind]) - own
        assert parameters == defaults.keys() - {"decoupled_weight_decay"}
        if kind != "AdamW":
            assert RULES[kind] == {name: defaults[name] for name in RULES[kind]}


def test_torchs_adamw_has_a_decay_of_its_own() -> None:
    def decay(kind: str, **params: Any) -> float:
        config = read(optimizer=optimizer(kind, **params)).optimizer
        assert config is not None
        return config.weight_decay

    torchs = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).defaults["weight_decay"]
    assert decay("AdamW", torch_adam=True) == torchs == 0.01
    assert decay("Adam", torch_adam=True) == torchs  # Adam means AdamW
    assert decay("Adam", torch_adam=True, adam_w_mode=False) == 0.0
    assert decay("AdamW", torch_adam=True, weight_decay=0.3) == 0.3
    assert decay("AdamW", torch_adam=False) == decay("AdamW") == 0.0


def test_what_a_rule_cannot_do_is_refused() -> None:
    assert "not supported in this version" in refused(optimizer={"type": "Muon"})["optimizer.type"]
    message = refused(optimizer={"type": "Adamax"})["optimizer.type"]
    assert "the kernels are AdamW, Adam, Lion, Adagrad, SGD, which train differently." in message
    assert "pass it as an object: initialize(optimizer=Adamax(...))" in message
    message = refused(optimizer=optimizer("SGD", nesterov=True))
    assert message == {"optimizer": "nesterov requires momentum > 0 and dampening 0"}
    assert (
        "negate the loss" in refused(optimizer=optimizer("SGD", maximize=True))["optimizer.params.maximize"]
    )


# Schedules


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("WarmupLR", {}),
        ("WarmupLR", {"warmup_min_lr": [0.0, 1e-5], "warmup_max_lr": [1e-3, 1e-4], "warmup_num_steps": 10.0}),
        ("WarmupDecayLR", {"total_num_steps": 100, "warmup_type": "linear"}),
        ("WarmupCosineLR", {"total_num_steps": 100, "warmup_min_ratio": 0.1, "cos_min_ratio": 0}),
        ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_second_step_size": None}),
        ("LRRangeTest", {"lr_range_test_staircase": True}),
    ],
)
def test_a_schedule_is_read(kind: str, params: dict[str, Any]) -> None:
    scheduler = read(scheduler={"type": kind, "params": params}).scheduler
    assert scheduler is not None
    assert (scheduler.type, scheduler.params) == (kind, PARAMS[kind].model_validate(params))
    outcomes = {
        entry[0]
        for key, entry in verdicts(scheduler={"type": kind, "params": params}).items()
        if key.startswith("scheduler.") and key != "scheduler.params"
    }
    assert outcomes == {KeyVerdict.HONOURED}


def test_lists_become_tuples_and_whole_numbers_whole() -> None:
    params = {"warmup_min_lr": [0, 1e-5], "warmup_num_steps": 10.0}
    scheduler = read(scheduler={"type": "WarmupLR", "params": params}).scheduler
    assert scheduler is not None
    dumped = scheduler.params.model_dump()
    assert dumped == {
        "warmup_min_lr": (0.0, 1e-5),
        "warmup_max_lr": None,
        "warmup_num_steps": 10,
        "warmup_type": "log",
    }
    assert type(dumped["warmup_num_steps"]) is int


@pytest.mark.parametrize("section", [None, {}, {"type": None}])
def test_without_a_schedule_there_is_none(section: object) -> None:
    assert read(scheduler=section).scheduler is None


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR"])
def test_auto_is_what_a_trainer_would_fill_in(kind: str) -> None:
    params = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 5}
    params |= {"total_num_steps": 9} if kind == "WarmupDecayLR" else {}
    scheduler = read(scheduler={"type": kind, "params": params}).scheduler
    assert scheduler is not None
    dumped = scheduler.params.model_dump()
    assert (dumped["warmup_min_lr"], dumped["warmup_max_lr"]) == (0.0, None)  # None: the optimizer's rate
    note = verdicts(scheduler={"type": kind, "params": params})["scheduler.params.warmup_max_lr"]
    assert note == (KeyVerdict.HONOURED, "the optimizer's rate, as trainers fill in")
    notes = refused(scheduler={"type": kind, "params": params | {"warmup_num_steps": "auto"}})
    remedy = "'auto' needs a trainer's argument: set a number, or pass initialize(args=...) with warmup_steps"
    assert notes == {"scheduler.params.warmup_num_steps": remedy}


@pytest.mark.parametrize(
    ("section", "key", "message"),
    [
        ({"type": "WarmupLr"}, "type", "unknown schedule 'WarmupLr'; did you mean 'WarmupLR'?"),
        ({"type": "StepLR"}, "type", "any other scheduler to initialize(lr_scheduler=...)"),
        (
            {"type": "xyz"},
            "type",
            "supported: WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest.",
        ),
        ({"type": 3}, "type", "unknown schedule '3'"),
        ({"params": {"warmup_num_steps": 3}}, "type", "missing; set it, for example 'WarmupLR'"),
        ({"type": "WarmupDecayLR"}, "params.total_num_steps", "missing; WarmupDecayLR requires it"),
        (
            {"type": "WarmupLR", "params": {"warmup_num_steps": -1}},
            "params.warmup_num_steps",
            "greater than or equal to 0",
        ),
        ({"type": "WarmupLR", "params": {"warmup_type": "cos"}}, "params.warmup_type", "'log' or 'linear'"),
        (
            {"type": "WarmupLR", "params": {"warmup_min_lr": "x"}},
            "params.warmup_min_lr",
            "one number per param group",
        ),
        ({"type": "WarmupLR", "params": {"warmup_min_lr": [1, -1]}}, "params.warmup_min_lr", "a number >= 0"),
        (
            {"type": "WarmupLR", "params": {"total_num_steps": 9}},
            "params.total_num_steps",
            "WarmupLR has no total_num_steps; it has warmup_num_steps, warmup_type, warmup_min_lr",
        ),
        (
            {"type": "WarmupLR", "params": {"warmup_steps": 9}},
            "params.warmup_steps",
            "did you mean scheduler.params.warmup_num_steps?",
        ),
        ({"type": "LRRangeTest", "params": {"lr_range_test_min_lr": []}}, "", ""),
    ],
)
def test_what_is_wrong_with_a_schedule(section: dict[str, Any], key: str, message: str) -> None:
    if not key:
        assert read(scheduler=section).scheduler is not None  # how many groups there are is not known here
        return
    ((refused_key, note),) = refused(scheduler=section).items()
    assert refused_key == f"scheduler.{key}"
    assert message in note


def test_every_problem_of_a_schedule_is_told() -> None:
    params = {"cycle_max_lr": "high", "cycle_momentum": 1, "warmup_type": "log", "decay_lr_rate": -1}
    assert refused(scheduler={"type": "OneCycle", "params": params}).keys() == {
        f"scheduler.params.{name}"
        for name in ("cycle_min_lr", "cycle_max_lr", "cycle_momentum", "warmup_type", "decay_lr_rate")
    }


# Precision


def test_fp16_and_its_loss_scale() -> None:
    section = {
        "enabled": True,
        "auto_cast": True,
        "loss_scale": 0,
        "initial_scale_power": 12,
        "loss_scale_window": 500,
        "hysteresis": 3,
        "consecutive_hysteresis": True,
        "min_loss_scale": 2,
    }
    config = read(fp16=section)
    assert (config.precision, config.cast_inputs) == ("fp16", True)
    assert config.loss_scale == LossScaleConfig(
        scale=0.0, initial_power=12, window=500, hysteresis=3, consecutive_hysteresis=True, min_scale=2.0
    )
    notes = verdicts(fp16=section)
    verdict, note = notes["fp16.loss_scale_window"]
    assert (verdict, note.partition(":")[0]) == (KeyVerdict.MAPPED, "loss_scale.window = 500")
    assert read(fp16={"enabled": True}).loss_scale == LossScaleConfig()


def test_a_fixed_loss_scale_needs_none_of_the_rest() -> None:
    section = {"enabled": True, "loss_scale": 128, "loss_scale_window": 0, "min_loss_scale": 0}
    assert read(fp16=section).loss_scale == LossScaleConfig(scale=128.0)
    assert verdicts(fp16=section)["fp16.loss_scale_window"] == (
        KeyVerdict.NO_EFFECT,
        "not used with a fixed loss scale",
    )
    assert "greater than 0" in refused(fp16=section | {"loss_scale": 0})["fp16.loss_scale_window"]


@pytest.mark.parametrize("enabled", [{"enabled": False}, {}])
def test_without_fp16_its_section_asks_for_nothing(enabled: dict[str, bool]) -> None:
    section = enabled | {"loss_scale": 128, "loss_scale_window": 0, "auto_cast": True}
    assert read(fp16=section, bf16={"enabled": True}) == read(bf16={"enabled": True})
    entries = verdicts(fp16=section)
    assert {entries[f"fp16.{name}"][0] for name in section.keys() - {"enabled"}} == {KeyVerdict.NO_EFFECT}
    assert "loss scaling belongs to fp16, which is not enabled" in entries["fp16.loss_scale"][1]


def test_inputs_are_cast_by_the_key_of_the_enabled_precision() -> None:
    on, off = {"enabled": True}, {"enabled": False}
    assert read(bf16=on | {"auto_cast": True}).cast_inputs
    assert read(bfloat16=on | {"auto_cast": True}).cast_inputs
    assert not read(bf16=on | {"auto_cast": False}, fp16=off | {"auto_cast": True}).cast_inputs
    assert read(bf16=on | {"auto_cast": True}, fp16=off | {"auto_cast": False}).cast_inputs
    assert read(fp16=on | {"auto_cast": True}, bf16=off | {"auto_cast": False}).cast_inputs
    assert not read(bf16=off | {"auto_cast": True}).cast_inputs
    notes = verdicts(bf16=on | {"auto_cast": True}, fp16=off | {"auto_cast": False})
    assert notes["bf16.auto_cast"][0] is KeyVerdict.MAPPED
    assert notes["fp16.auto_cast"] == (
        KeyVerdict.NO_EFFECT,
        "casting inputs belongs to fp16, which is not enabled",
    )
    assert "valid boolean" in refused(bf16=on | {"auto_cast": "yes"})["bf16.auto_cast"]


def test_wrong_loss_scales_are_told_by_their_key() -> None:
    def messages(**section: Any) -> dict[str, str]:
        return refused(fp16={"enabled": True} | section)

    assert "greater than or equal to 0" in messages(loss_scale=-1)["fp16.loss_scale"]
    assert "valid number" in messages(loss_scale=True)["fp16.loss_scale"]
    assert "whole number" in messages(hysteresis=1.5)["fp16.hysteresis"]
    assert "below its minimum 8" in messages(initial_scale_power=2, min_loss_scale=8)["fp16"]
    assert "did you mean loss_scale_window?" in messages(loss_scale_windw=8)["fp16.loss_scale_windw"]


def test_one_precision_at_a_time() -> None:
    messages = refused(fp16={"enabled": True}, bf16={"enabled": True})
    assert messages == {"bf16.enabled": 'true contradicts fp16.enabled, which is "fp16"; remove one of them'}
    assert read(fp16={"enabled": True}, bf16={"enabled": False}).precision == "fp16"
    assert read(fp16={"enabled": False}, bf16={"enabled": True}).precision == "bf16"
    assert read(fp16={"enabled": False}, bf16={"enabled": False}).precision == "fp32"
    assert read(data_types={"param_dtype": "torch.bfloat16"}, bf16={"enabled": True}).precision == "bf16"
    messages = refused(data_types={"param_dtype": "float32"}, bf16={"enabled": True})
    assert "contradicts" in messages["bf16.enabled"]


def test_autocast() -> None:
    for name, dtype in {
        "bfloat16": "bf16",
        "torch.bfloat16": "bf16",
        "float16": "fp16",
        "half": "fp16",
    }.items():
        assert read(torch_autocast={"enabled": True, "dtype": name}).autocast == dtype
    section = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": ["torch.nn.Linear"]}
    assert (
        verdicts(torch_autocast=section)["torch_autocast.lower_precision_safe_modules"][0]
        is KeyVerdict.NO_EFFECT
    )
    # DeepSpeed allows both: parameters in one dtype, operations in another.
    both = read(torch_autocast=section, fp16={"enabled": True})
    assert (both.precision, both.autocast) == ("fp16", "bf16")


@pytest.mark.parametrize("enabled", [{"enabled": False}, {}, {"enabled": None}])
def test_autocast_that_is_off(enabled: dict[str, Any]) -> None:
    section = enabled | {"dtype": "float32"}
    assert read(torch_autocast=section) == read()
    assert verdicts(torch_autocast=section)["torch_autocast.dtype"] == (
        KeyVerdict.NO_EFFECT,
        "off: autocast is not enabled",
    )


def test_autocast_that_cannot_be_read() -> None:
    assert refused(torch_autocast={"enabled": True}) == {
        "torch_autocast.dtype": "missing; set 'bfloat16' or 'float16'"
    }
    assert "one of bf16, fp16 is needed, not 'float32'" in str(
        refused(torch_autocast={"enabled": True, "dtype": "float32"})
    )
    assert refused(torch_autocast={"enabled": "yes", "dtype": "half"}) == {
        "torch_autocast.enabled": "true or false is needed, not 'yes'"
    }
    assert "trainer" in refused(torch_autocast={"enabled": "auto"})["torch_autocast.enabled"]


def test_autocast_to_fp16_scales_the_loss_as_torchs_own_scaler() -> None:
    scaler = torch.amp.GradScaler(device="cpu")
    scale = read(torch_autocast={"enabled": True, "dtype": "float16"}, fp16={"loss_scale": 3}).loss_scale
    assert (2.0**scale.initial_power, scale.window) == (scaler.get_scale(), scaler.get_growth_interval())
    assert (scale.scale, scale.hysteresis) == (0.0, 1)
    assert read(torch_autocast={"enabled": True, "dtype": "bfloat16"}).loss_scale == LossScaleConfig()


# What is offloaded


def test_a_share_of_the_optimizer_state() -> None:
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}
    assert read(zero_optimization=zero).zero.offload_optimizer.ratio == 0.3
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": 3}}
    assert (
        "less than or equal to 1"
        in refused(zero_optimization=zero)["zero_optimization.offload_optimizer.ratio"]
    )


def test_a_stage_that_does_not_partition_is_told() -> None:
    zero: dict[str, Any] = {"stage": 2, "offload_param": {"device": "nvme", "nvme_path": "/a"}}
    assert read(zero_optimization=zero).zero.offload_param.device == "none"
    verdict = verdicts(zero_optimization=zero)["zero_optimization.offload_param.device"]
    assert verdict == (
        KeyVerdict.NO_EFFECT,
        "stage 2 keeps parameters on the device, as in DeepSpeed; stage 3 can offload",
    )
    assert read(zero_optimization={"cpu_offload_param": True}).zero.offload_param.device == "none"
    # A training file at stage 0.
    reference = {"stage": 0, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    assert read(zero_optimization=reference).zero.offload_optimizer == OffloadOptimizerConfig()
    assert verdicts(zero_optimization=reference)["zero_optimization.offload_optimizer.device"] == (
        KeyVerdict.NO_EFFECT,
        "stage 0 keeps optimizer state on the device, as in DeepSpeed; stage 1 can offload",
    )
    assert read(zero_optimization={"cpu_offload": True}).zero.offload_optimizer.device == "none"
    assert read(zero_optimization={"stage": 1, "cpu_offload": True}).zero.offload_optimizer.device == "cpu"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp32", "fp32"),
        ("bf16", "bf16"),
        ("fp16", "fp16"),
        ("bfloat16", "bf16"),
        (None, "auto"),
        ("auto", "auto"),
    ],
)
def test_gradients_accumulate_in_any_of_the_dtypes(name: str | None, dtype: str) -> None:
    assert read(data_types={"grad_accum_dtype": name}).tiering.grad_accum_dtype == dtype
    assert "one of fp32, bf16, fp16" in str(refused(data_types={"grad_accum_dtype": "int8"}))
