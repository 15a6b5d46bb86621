from __future__ import annotations

import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from tiering.config.batch import Batch, resolve_batch
from tiering.config.scheduler import PARAMS, Schedule
from tiering.config.training import (
    IoConfig,
    LossScaleConfig,
    OffloadConfig,
    OffloadOptimizerConfig,
    OptimizerConfig,
    QuantizeConfig,
    StepPolicy,
    TieringConfig,
    TiersConfig,
    ZeroConfig,
    format_size,
    parse_size,
)

SCHEDULES: tuple[type[BaseModel], ...] = get_args(get_args(Schedule)[0])

UNITS = {
    "": 1,
    "B": 1,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
}
UNITS |= {"TiB": 2**40, "PiB": 2**50, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@given(st.integers(0, 10**6), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_sizes_are_number_times_unit(number: int, unit: str, space: str) -> None:
    assert parse_size(f"{number}{space}{unit}") == number * UNITS[unit]


@given(st.decimals(0, 10**6, places=3), st.sampled_from(sorted(UNITS)))
def test_fractions_of_a_byte_are_dropped(number: Any, unit: str) -> None:
    assert parse_size(f"{number}{unit}") == int(Fraction(number) * UNITS[unit])


@given(st.integers(0, 2**62))
def test_whole_numbers_are_bytes(number: int) -> None:
    assert parse_size(number) == parse_size(str(number)) == number
    if number < 2**53:
        assert parse_size(float(number)) == number


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (-1, "negative"),
        ("-4K", "negative"),
        ("-0.1", "negative"),
        (1.5, "whole number"),
        (True, "whole number"),
        (None, "whole number"),
        (float("inf"), "whole number"),
        ("", "a number with a unit"),
        ("GiB", "a number with a unit"),
        ("1 2K", "a number with a unit"),
        ("1e9", "a number with a unit"),
        ("٣K", "a number with a unit"),
        ("1Gib", "did you mean 'GiB'"),
        ("1gib", "did you mean 'GiB'"),
        ("1gb", "did you mean 'GB'"),
        ("1GBi", "did you mean 'G"),
        ("1 parsec", "unknown unit 'parsec'"),
    ],
)
def test_what_is_not_a_size_is_refused(size: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_size(size)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1.5 * 2**30, "1.50 GiB"), (2**61, "2048.00 PiB")],
)
def test_sizes_as_text(size: float, text: str) -> None:
    assert format_size(size) == text


POSITIVE = st.integers(1, 1000)


@given(POSITIVE, POSITIVE, st.integers(1, 16))
def test_two_batch_numbers_make_the_third(micro: int, accumulation: int, world: int) -> None:
    batch = Batch(micro * accumulation * world, micro, accumulation)
    assert resolve_batch(*batch, world) == batch
    assert resolve_batch(batch.train, micro, None, world) == batch
    assert resolve_batch(batch.train, None, accumulation, world) == batch
    assert resolve_batch(None, micro, accumulation, world) == batch


@given(POSITIVE, st.integers(1, 16))
def test_one_batch_number_means_no_accumulation(micro: int, world: int) -> None:
    assert resolve_batch(micro * world, None, None, world) == Batch(micro * world, micro, 1)
    assert resolve_batch(None, micro, None, world) == Batch(micro * world, micro, 1)


@given(POSITIVE, POSITIVE, POSITIVE, st.integers(1, 16))
def test_contradicting_batch_numbers_are_named(train: int, micro: int, accumulation: int, world: int) -> None:
    if train == micro * accumulation * world:
        assert resolve_batch(train, micro, accumulation, world) == (train, micro, accumulation)
        return
    with pytest.raises(ValueError, match="do not agree") as caught:
        resolve_batch(train, micro, accumulation, world)
    for part in (
        f"train_batch_size {train}",
        f"per_gpu {micro}",
        f"steps {accumulation}",
        f"world size {world}",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((None, None, None), "both are missing"),
        ((None, None, 4), "both are missing"),
        ((0, None, None), "train_batch_size must be positive, not 0"),
        ((None, 2, -1), "gradient_accumulation_steps must be positive, not -1"),
        ((5, 2, None), "do not agree"),
        ((5, None, 2), "do not agree"),
        ((1, 2, None), "do not agree"),
    ],
)
def test_insufficient_batch_numbers(numbers: tuple[int | None, int | None, int | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_batch(*numbers)


def test_one_sample_cannot_feed_two_ranks() -> None:
    with pytest.raises(ValueError, match="world size 2 do not agree"):
        resolve_batch(1, None, None, 2)


def test_the_config_is_frozen_and_knows_its_keys() -> None:
    config = TieringConfig(train_batch_size=4, micro_batch_size=2, gradient_accumulation_steps=2)
    with pytest.raises(ValidationError, match="frozen"):
        config.tiering.io.queue_depth = 1
    with pytest.raises(ValidationError, match="Extra inputs"):
        IoConfig(queue_dept=1)
    with pytest.raises(ValidationError, match="do not agree"):
        TieringConfig(train_batch_size=4, micro_batch_size=2)


def test_defaults_are_deepspeeds() -> None:
    config = TieringConfig(train_batch_size=1, micro_batch_size=1)
    assert (config.optimizer, config.scheduler, config.autocast, config.cast_inputs) == (
        None,
        None,
        None,
        False,
    )
    assert config.loss_scale == LossScaleConfig(
        scale=0.0,
        initial_power=16,
        window=1000,
        hysteresis=2,
        consecutive_hysteresis=False,
        min_scale=1.0,
    )
    zero = config.zero
    assert (zero.stage, zero.offload_optimizer.ratio) == (0, 1.0)
    assert (zero.sub_group_size, zero.prefetch_elements, zero.persistence_threshold) == (
        10**9,
        5 * 10**7,
        10**5,
    )
    assert (config.precision, config.gradient_clipping, config.steps_per_print) == ("fp32", 0.0, None)


def _sections(model: type[BaseModel]) -> set[type[BaseModel]]:
    """``model`` and every section below it, also where it is one of several or may be missing."""
    models = {model}
    kinds = [info.annotation for info in model.model_fields.values()]
    while kinds:
        kind = kinds.pop()
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            models |= _sections(kind)
        kinds += get_args(kind)
    return models


def test_every_field_is_described() -> None:
    sections = _sections(TieringConfig)
    assert {OptimizerConfig, LossScaleConfig, OffloadOptimizerConfig, *SCHEDULES} <= sections
    for section in sections:
        for name, info in section.model_fields.items():
            assert info.description and info.description.endswith("."), f"{section.__name__}.{name}"


@pytest.mark.parametrize(
    ("section", "values"),
    [
        (OptimizerConfig, {"type": "Lamb"}),
        (
            TieringConfig,
            {
                "train_batch_size": 2,
                "micro_batch_size": 1,
                "world_size": 2,
                "tiering": {"step": "in_backward"},
            },
        ),
    ],
)
def test_what_is_planned_is_refused_by_name(section: type[BaseModel], values: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=r"not supported in this version; [a-z]"):
        section.model_validate(values)


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (ZeroConfig, {"stage": 4}, "should be 0, 1, 2 or 3"),
        (
            ZeroConfig,
            {"stage": 2, "offload_param": {"device": "cpu"}},
            "stage 2 keeps .*: use stage 3, or remove",
        ),
        (
            ZeroConfig,
            {"stage": 0, "offload_optimizer": {"device": "cpu"}},
            "stage 0 keeps .*: use stage 1, 2 or 3, or remove",
        ),
        (OffloadOptimizerConfig, {"ratio": 1.1}, "less than or equal to 1"),
        (OffloadOptimizerConfig, {"ratio": -0.1}, "greater than or equal to 0"),
        (OffloadOptimizerConfig, {"ratio": True}, "valid number"),
        (OffloadConfig, {"ratio": 0.5}, "Extra inputs"),
        (LossScaleConfig, {"scale": -1}, "greater than or equal to 0"),
        (LossScaleConfig, {"initial_power": 128}, "less than or equal to 127"),
        (LossScaleConfig, {"window": 0}, "greater than 0"),
        (LossScaleConfig, {"hysteresis": 0}, "greater than 0"),
        (LossScaleConfig, {"min_scale": 0}, "greater than 0"),
        (
            LossScaleConfig,
            {"initial_power": 3, "min_scale": 9},
            r"starts at 2\*\*3, below its minimum 9; raise",
        ),
        (ZeroConfig, {"stage": True}, "whole number"),
        (ZeroConfig, {"sub_group_size": 0}, "greater than 0"),
        (ZeroConfig, {"prefetch_elements": -1}, "greater than or equal to 0"),
        (OffloadConfig, {"device": "nvme"}, "needs nvme_path"),
        (OffloadConfig, {"device": "nvme", "nvme_path": []}, "the list of directories is empty"),
        (OffloadConfig, {"device": "nvme", "nvme_path": ""}, "a path is empty"),
        (OffloadConfig, {"device": "nvme", "nvme_path": ["/x", ""]}, "a path is empty"),
        (OffloadConfig, {"device": "nvme", "nvme_path": ["/x", "/y", "/x/"]}, "'/x' is listed twice"),
        (
            OffloadConfig,
            {"device": "nvme", "nvme_path": 3},
            "a directory or a list of directories is needed, not 3",
        ),
        (OffloadConfig, {"device": "nvme", "nvme_path": ["/x", 3]}, "not a valid path"),
        (IoConfig, {"engine": "uring"}, "'auto', 'io_uring', 'libaio' or 'threads'"),
        (IoConfig, {"allow_memory_file_system": 1}, "valid boolean"),
        (OffloadConfig, {"device": "disk"}, "'none', 'cpu' or 'nvme'"),
        (OptimizerConfig, {"lr": float("nan")}, "finite"),
        (OptimizerConfig, {"lr": "0.1"}, "valid number"),
        (OptimizerConfig, {"lr": True}, "valid number"),
        (OptimizerConfig, {"betas": [0.9, 1.0]}, "less than 1"),
        (OptimizerConfig, {"betas": [0.9]}, "Field required"),
        (OptimizerConfig, {"type": "AdamW", "decoupled": False}, "use type 'Adam'"),
        (OptimizerConfig, {"type": "adamw"}, "'AdamW', 'Adam', 'Lion', 'Adagrad' or 'SGD'"),
        (OptimizerConfig, {"type": 3}, "'AdamW', 'Adam', 'Lion', 'Adagrad' or 'SGD'"),
        (OptimizerConfig, {"momentum": 0.9}, "AdamW has no momentum; it has lr, betas, eps, weight_decay"),
        (OptimizerConfig, {"type": "Lion", "eps": 1e-6}, "Lion has no eps; it has lr, betas, weight_decay "),
        (OptimizerConfig, {"type": "SGD", "betas": [0.5, 0.5]}, "SGD has no betas"),
        (OptimizerConfig, {"type": "SGD", "nesterov": True}, "nesterov requires momentum > 0"),
        (
            OptimizerConfig,
            {"type": "SGD", "nesterov": True, "momentum": 0.9, "dampening": 0.1},
            "and dampening 0",
        ),
        (TiersConfig, {"host_budget": "-1GiB"}, "negative"),
        (TiersConfig, {"host_budget": "most"}, "a number with a unit"),
        (TiersConfig, {"cache_in_host": 1}, "valid boolean"),
        (TiersConfig, {"state": "fp16"}, "'fp32', 'split', 'bf16' or 'split\\+bf16'"),
        (TiersConfig, {"state": True}, "'fp32', 'split', 'bf16' or 'split\\+bf16'"),
        (TiersConfig, {"step": "late"}, "'after', 'deferred', 'in_backward' or 'auto'"),
        (TiersConfig, {"step": True}, "'after', 'deferred', 'in_backward' or 'auto'"),
        (TiersConfig, {"verify": 0}, "valid boolean"),
        (TiersConfig, {"max_skipped_steps": -1}, "greater than or equal to 0"),
        (TiersConfig, {"run_name": "../x"}, "match pattern"),
        (
            QuantizeConfig,
            {"modules": "up_proj", "block_size": 32},
            "block_size, modules without type; set type",
        ),
        (
            QuantizeConfig,
            {"type": "nf4", "block_size": 48},
            "block_size is 48; it must be a power of two from 32",
        ),
        (QuantizeConfig, {"type": "nf4", "block_size": "64"}, "a whole number is needed, not '64'"),
        (IoConfig, {"block_size": "3K"}, "multiple of 4096"),
        (IoConfig, {"block_size": 0}, "greater than 0"),
        (IoConfig, {"queue_depth": 0}, "greater than 0"),
        (IoConfig, {"queue_depth": 513}, "less than or equal to 512"),
    ],
)
def test_wrong_values_are_refused(section: type[BaseModel], values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        section.model_validate(values)


def tiers_of(tiers: dict[str, object], **values: object) -> TiersConfig:
    return TieringConfig.model_validate(
        {"train_batch_size": 1, "micro_batch_size": 1, "tiering": tiers} | values
    ).tiering


def problems(tiers: dict[str, object], **values: object) -> list[tuple[str, str]]:
    """The refused keys, and what is said about them."""
    with pytest.raises(ValidationError) as caught:
        tiers_of(tiers, **values)
    return [(".".join(map(str, problem["loc"])), problem["msg"]) for problem in caught.value.errors()]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("state", ["fp32", "split", "bf16", "split+bf16"])
def test_only_a_bf16_parameter_is_half_of_its_master(state: str, precision: str) -> None:
    if precision == "bf16" or not state.startswith("split"):
        assert tiers_of({"state": state}, precision=precision).state == state
        return
    ((key, message),) = problems({"state": state}, precision=precision)
    remedy = "bf16" if state == "split+bf16" else "fp32"
    assert key == "tiering.state"
    assert f"{state!r} with precision {precision}: only a bf16 parameter is" in message
    assert f"set bf16.enabled to true, or state to {remedy!r}" in message


IN_BACKWARD = {"step": "in_backward"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"gradient_clipping": 0.5},
            "with gradient_clipping 0.5: .*; set swap_versions to 2, step to 'deferred', or gradient_clipping to 0",
        ),
        (
            {"precision": "fp16"},
            "dynamic loss scale .*; set swap_versions to 2, step to 'deferred', or fp16.loss_scale to a fixed scale",
        ),
        ({"autocast": "fp16"}, "dynamic loss scale .*; set swap_versions to 2, .*, or autocast to bf16"),
    ],
)
def test_what_needs_all_gradients_forbids_steps_in_backward(values: dict[str, object], message: str) -> None:
    ((key, text),) = problems(IN_BACKWARD, **values)
    assert key == "tiering.step"
    assert re.search(message, text)
    for other in ("after", "deferred", "auto"):
        assert tiers_of({"step": other}, **values).step == other
    assert tiers_of(IN_BACKWARD | {"swap_versions": 2}, **values).step is StepPolicy.IN_BACKWARD


@pytest.mark.parametrize(
    "values",
    [
        {"precision": "bf16"},
        {"precision": "fp32", "gradient_accumulation_steps": 4, "train_batch_size": 4},
        {"precision": "fp16", "loss_scale": {"scale": 1024.0}},
        {"autocast": "fp16", "loss_scale": {"scale": 1024.0}},
        {"autocast": "bf16"},
    ],
)
def test_steps_in_backward_are_taken_where_nothing_forbids_them(values: dict[str, object]) -> None:
    assert tiers_of(IN_BACKWARD, **values).step is StepPolicy.IN_BACKWARD


def test_every_key_that_does_not_suit_is_told_at_once() -> None:
    messages = problems(IN_BACKWARD | {"state": "split"}, precision="fp16", gradient_clipping=1.0)
    assert [key for key, _ in messages] == ["tiering.state", *["tiering.step"] * 2]


def test_values_are_read_as_written_in_files() -> None:
    zero = ZeroConfig.model_validate({"stage": 3.0, "sub_group_size": 1e9})
    assert (zero.stage, zero.sub_group_size) == (3, 10**9)
    assert type(zero.sub_group_size) is int
    tiers = TiersConfig.model_validate(
        {"host_budget": "1.5GiB", "nvme_budget": "auto", "io": {"block_size": "64K"}}
    )
    assert (tiers.host_budget, tiers.nvme_budget, tiers.io.block_size) == (3 * 2**29, "auto", 65536)
    assert tiers.io.engine == "auto"
    assert IoConfig.model_validate({"engine": "io_uring", "registered": False}).engine == "io_uring"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("param", ["none", "cpu"])
@pytest.mark.parametrize("optimizer", ["none", "cpu"])
def test_a_stage_moves_only_what_it_partitions(stage: int, param: str, optimizer: str) -> None:
    values = {"stage": stage, "offload_param": {"device": param}, "offload_optimizer": {"device": optimizer}}
    if stage >= (3 if param == "cpu" else 1 if optimizer == "cpu" else 0):
        assert ZeroConfig.model_validate(values).stage == stage
    else:
        with pytest.raises(ValidationError, match=f"stage {stage} keeps"):
            ZeroConfig.model_validate(values)


def test_a_rule_has_the_defaults_of_the_class_that_deepspeed_makes() -> None:
    adam = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    adam |= {"decoupled": True, "bias_correction": True}
    rules: dict[str, dict[str, object]] = {
        "AdamW": adam,
        "Adam": adam,
        "Lion": {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0},
        "Adagrad": {
            "lr": 1e-2,
            "lr_decay": 0.0,
            "weight_decay": 0.0,
            "initial_accumulator_value": 0.0,
            "eps": 1e-10,
        },
        "SGD": {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
    }
    for rule, fields in rules.items():
        config = OptimizerConfig.model_validate({"type": rule})
        assert {name: getattr(config, name) for name in fields} == fields
        assert OptimizerConfig.model_validate(config.model_dump()) == config
    # What a rule does not have stays off.
    sgd = OptimizerConfig(type="SGD", momentum=0.9)
    assert (sgd.momentum, sgd.lr_decay, sgd.initial_accumulator_value) == (0.9, 0.0, 0.0)


def test_a_loss_scale_below_a_minimum_that_a_fixed_one_never_reads() -> None:
    assert LossScaleConfig(scale=2.0, initial_power=0, min_scale=8.0).scale == 2.0


def test_every_schedule_has_its_parameters() -> None:
    assert {schedule.__name__ for schedule in SCHEDULES} == {f"{name}Config" for name in PARAMS}
    for schedule in SCHEDULES:
        (name,) = get_args(schedule.model_fields["type"].annotation)
        assert schedule.model_fields["params"].annotation is PARAMS[name]


@pytest.mark.parametrize(
    ("setting", "read"),
    [
        ("/x", (Path("/x"),)),
        (["/x"], (Path("/x"),)),
        (["/x", "y/z"], (Path("/x"), Path("y/z"))),
        (Path("/x"), (Path("/x"),)),
        ("~/x", (Path.home() / "x",)),
    ],
)
def test_nvme_path_is_one_directory_or_several(setting: object, read: tuple[Path, ...]) -> None:
    assert OffloadConfig.model_validate({"device": "nvme", "nvme_path": setting}).nvme_path == read


def test_swap_directories_are_those_of_sections_on_nvme_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("/x")
    zero = ZeroConfig.model_validate(
        {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": ["/x", "y"]},
            "offload_optimizer": {"device": "nvme", "nvme_path": ["/z", "link"]},
        }
    )
    assert zero.offload_param.swap_directories == (Path("/x"), tmp_path / "y")
    assert zero.swap_directories == (Path("/x"), tmp_path / "y", Path("/z"))
    assert OffloadConfig.model_validate({"device": "cpu", "nvme_path": "/x"}).swap_directories == ()


def test_no_nvme_path() -> None:
    assert OffloadConfig.model_validate({"device": "cpu", "nvme_path": None}).nvme_path == ()


def test_reading_configuration_loads_no_torch() -> None:
    probe = "import sys, tiering.config.ds_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0
