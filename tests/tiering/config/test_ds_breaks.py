"""What was tried to break the reader of configurations, and did."""

from __future__ import annotations

import base64
import json
import os
from collections import UserDict, UserList
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiering.config.ds_config import LoadContext, examine, load
from tiering.errors import ConfigError

WHOLE: dict[str, Any] = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": ["/a", "/b"]},
        "stage3_max_live_parameters": 1e9,
    },
    "gradient_clipping": 0.5,
}


@pytest.mark.parametrize("wrapped", [False, True], ids=["one line", "as `base64` wraps it"])
def test_a_long_configuration_in_base64_is_no_path(wrapped: bool) -> None:
    text = base64.urlsafe_b64encode(json.dumps(WHOLE, indent=4).encode()).decode()
    assert len(text) > 255  # more than a file's name may have
    if wrapped:
        text = "\n".join(text[at : at + 76] for at in range(0, len(text), 76))
    config, report = load(text)
    assert config == load(WHOLE)[0]
    assert report.source == ""  # where the report says "ds_config.json", this would be the whole text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (None, "not NoneType"),
        (b"{}", "not bytes"),
        ("a\0b", "embedded null byte"),
        ("x" * 5000, "File name too long"),
        (json.dumps(WHOLE) * 10, r"\.\.\..*No such file"),
    ],
)
def test_what_is_no_configuration_is_told_in_a_line(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        examine(settings)
    assert len(str(caught.value)) < 400


def test_values_of_other_libraries_are_those_of_json() -> None:
    """As OmegaConf and numpy have them: mappings and sequences that are no dict and no list, scalars, arrays."""
    settings = UserDict(
        WHOLE
        | {
            "train_batch_size": np.float32(8),
            "gradient_clipping": np.array(0.5),
            "optimizer": UserDict(type="AdamW", params=UserDict(lr=1e-3, betas=np.array([0.9, 0.95]))),
            "zero_optimization": UserDict(
                WHOLE["zero_optimization"]
                | {"offload_param": UserDict(device="nvme", nvme_path=UserList(["/a", "/b"]))}
            ),
        }
    )
    assert load(settings)[0] == load(WHOLE)[0]
    pair = np.array([1, 2])  # to ask whether it equals something raises
    for path in ("gradient_clipping", "amp", "steps_per_print"):
        for value, arguments in ((pair, {}), ("auto", {"max_grad_norm": pair})):
            _, report = examine(
                {"train_batch_size": 8, path: value}, context=LoadContext(arguments=arguments)
            )
            assert [entry.key for entry in report.refused] == [path]
    context = LoadContext(arguments={"learning_rate": np.float32(0.5), "max_steps": np.int64(9)})
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}
    config, _ = load(adam(lr="auto") | {"scheduler": schedule}, context=context)
    assert config.optimizer is not None
    assert config.optimizer.lr == 0.5


def test_what_holds_itself_is_no_configuration(tmp_path: Path) -> None:
    circle: dict[str, Any] = {"train_batch_size": 8}
    circle["datastates_ckpt"] = {"of": circle}
    file = tmp_path / "deep.json"
    file.write_text('{"checkpoint": ' * 600 + "1" + "}" * 600, encoding="utf-8")
    for settings in (circle, file):
        with pytest.raises(ConfigError, match="nested deeper than 100 levels"):
            examine(settings)


def settings(**changes: Any) -> dict[str, Any]:
    return {"train_batch_size": 8} | changes


def adam(kind: str = "Adam", **params: Any) -> dict[str, Any]:
    return settings(optimizer={"type": kind, "params": params})


@pytest.mark.parametrize(
    ("section", "precision"),
    [
        (None, "bf16"),
        ({}, None),
        ({"enabled": False}, None),
        ({"enabled": True}, "bf16"),
        ({"enabled": "auto"}, None),
    ],
)
@pytest.mark.parametrize("old_first", [False, True])
def test_the_old_section_counts_where_the_new_one_is_not_there(
    section: object, precision: str | None, old_first: bool
) -> None:
    """DeepSpeed 0.19 does not look at "bfloat16" if there is "bf16": what it trains in fp32 must not be bf16 here."""
    both: dict[str, Any] = {"bf16": section, "bfloat16": {"enabled": True}}
    config, report = examine(settings(**(dict(reversed(both.items())) if old_first else both)))
    assert (config.precision if config else None) == precision
    if config is None:
        assert [entry.key for entry in report.refused] == ["bfloat16.enabled"]


@pytest.mark.parametrize(
    ("kind", "params", "decay"),
    [
        # AdamW has torch's default, whatever the mode is.
        ("AdamW", {"torch_adam": True, "adam_w_mode": False}, 0.01),
        ("Adam", {"torch_adam": 1}, 0.01),
        ("Adam", {"torch_adam": 0}, 0.0),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, 0.0),
        ("Adam", {"torch_adam": True, "weight_decay": "auto"}, 0.0),
    ],
)
def test_torchs_decay_is_for_the_class_that_deepspeed_makes(
    kind: str, params: dict[str, Any], decay: float
) -> None:
    config, _ = load(adam(kind, **params))
    assert config.optimizer is not None
    assert config.optimizer.weight_decay == decay


@pytest.mark.parametrize("value", [False, None, 0])
def test_null_is_false_where_true_is_the_default(value: object) -> None:
    _, report = examine(settings(managed_gradient_accumulation=value))
    assert [entry.problem() for entry in report.refused if "delete the line" in entry.note]
    uncorrected = load(adam(bias_correction=value))[0].optimizer
    assert uncorrected is not None and uncorrected.bias_correction is False
    assert load(adam(bias_correction=True))[0] == load(adam(bias_correction=1))[0] == load(adam())[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("FusedAdam", "did you mean 'Adam'?"),
        ("DeepSpeedCPUAdam", "did you mean 'Adam'?"),
        ("torch.optim.AdamW", "did you mean 'AdamW'?"),
        ("torch.optim.NAdam", "pass it as an object: initialize(optimizer=NAdam(...))"),
        (
            "OnebitAdam",
            "'OneBitAdam' is not supported in this version; another optimizer changes the training",
        ),
        (
            "zerooneadam",
            "'ZeroOneAdam' is not supported in this version; another optimizer changes the training",
        ),
    ],
)
def test_the_name_of_a_class_is_no_name_of_an_optimizer(name: str, message: str) -> None:
    _, report = examine(adam(name))
    assert [message in entry.note for entry in report.refused] == [True]


def test_one_beta_of_a_trainer_leaves_the_other_at_its_default() -> None:
    for arguments, betas in (
        ({"adam_beta1": 0.8}, (0.8, 0.999)),
        ({"adam_beta2": 0.95}, (0.9, 0.95)),
        ({}, (0.9, 0.999)),
    ):
        config, _ = load(adam(betas="auto"), context=LoadContext(arguments=arguments))
        assert config.optimizer is not None
        assert config.optimizer.betas == betas


@pytest.mark.parametrize("value", ["100", True, float("nan"), float("inf"), [1]])
@pytest.mark.parametrize("name", ["max_steps", "warmup_steps", "warmup_ratio"])
def test_arguments_that_are_no_numbers_are_told_by_their_name(name: str, value: object) -> None:
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}}
    arguments = {"max_steps": 10, "warmup_steps": 0, "warmup_ratio": 0.1} | {name: value}
    _, report = examine(settings(scheduler=schedule), context=LoadContext(arguments=arguments))
    assert report.refused
    assert all(f"args.{name}" in entry.note for entry in report.refused)


def test_the_batch_of_the_whole_is_what_the_trainer_has() -> None:
    """Where only train_batch_size is there, trainers fill in the product of theirs."""
    trainer_context = LoadContext(
        arguments={"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    )
    config, report = load({"train_batch_size": "auto"}, world_size=3, context=trainer_context)
    assert (config.train_batch_size, config.micro_batch_size, config.gradient_accumulation_steps) == (
        24,
        4,
        2,
    )
    assert [(entry.value, entry.note) for entry in report.entries] == [
        (24, "computed from the other batch keys")
    ]
    context = replace(trainer_context, strict=False)
    config, _ = load({"train_batch_size": "auto", "gradient_accumulation_steps": 5}, context=context)
    assert (config.train_batch_size, config.gradient_accumulation_steps) == (20, 5)


def test_what_is_no_number_does_not_contradict_itself() -> None:
    for value in (float("nan"), float("inf")):
        _, report = examine(
            adam(lr=value, eps="auto"), context=LoadContext(arguments={"adam_epsilon": value})
        )
        assert ["finite number" in entry.note for entry in report.refused] == [True, True]


def test_a_path_in_no_encoding_can_be_shown(tmp_path: Path) -> None:
    file = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.json"))
    file.write_text(json.dumps(WHOLE), encoding="utf-8")
    _, report = load(file)
    assert report.source == f"{tmp_path}/\\xff.json"
    report.short().encode()


def test_a_path_that_is_not_used_need_not_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    for device in ("cpu", "none", None):
        section = {"nvme_path": "${SLURM_TMPDIR}/swap"} | ({"device": device} if device else {})
        config, report = load(settings(zero_optimization={"stage": 3, "offload_param": section}))
        assert config.zero.offload_param.nvme_path == ()
        assert report.without_effect == ()


@pytest.mark.parametrize("path", ["~nobody-here/swap", ["/a", "~nobody-here/swap"]])
def test_a_home_that_nobody_has_is_told_by_its_key(path: object) -> None:
    section = {"device": "nvme", "nvme_path": path}
    _, report = examine(settings(zero_optimization={"stage": 3, "offload_param": section}))
    assert [(entry.key, "'~nobody-here/swap'" in entry.note) for entry in report.refused] == [
        ("zero_optimization.offload_param.nvme_path", True)
    ]


def test_the_directory_of_telemetry_may_be_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config, _ = load(settings(tiering={"telemetry": {"dir": "~/runs"}}))
    assert config.tiering.telemetry.dir == Path("/home/me/runs")


def telemetry(**section: object) -> dict[str, Any]:
    return {"tiering": {"telemetry": section}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"comment": "for the big node"}, "write a comment after // or #"),
        ({"warmup": 8}, "remove it: neither DeepSpeed nor tiering has it"),
        ({"TRAIN_BATCH_SIZE": 8}, "did you mean train_batch_size?"),
        (adam(betas=[0.9]), r"missing value in [0.9]"),
        (telemetry(labels={"run": "x"}), "the label 'run' is reserved; use another name"),
        (telemetry(labels={"a-b": "x"}), "'a-b' is not a label name"),
        (telemetry(labels={"team": "x" * 129}), "the value of 'team' is longer than 128 characters"),
        (telemetry(links={"": "http://tb"}), "the link to 'http://tb' has no name; name the tool"),
        (telemetry(links={"x" * 129: "http://tb"}), "is longer than 128 characters"),
        (telemetry(links={"TB": "http://" + "x" * 994}), "the link 'TB' is longer than 1000 characters"),
        (telemetry(links={"TB": "javascript:alert(1)"}), "it must begin with http:// or https://"),
        (telemetry(flops_per_token=0), "greater than 0"),
        (telemetry(flops_per_token="1e9"), "valid number"),
        (telemetry(flops_per_token=True), "valid number"),
        (telemetry(flops_per_token=float("nan")), "finite number"),
        (telemetry(flops_per_token=1e19), "less than or equal to"),
    ],
)
def test_what_people_write_is_told_with_the_remedy(changes: dict[str, Any], message: str) -> None:
    _, report = examine(settings(**changes))
    assert [message in entry.note for entry in report.refused] == [True]


def test_a_name_that_begins_with_an_underscore_is_a_remark() -> None:
    config, report = load(
        settings(_comment="for the big node", zero_optimization={"_note": {"of": "ours"}, "stage": 2})
    )
    assert config.zero.stage == 2
    remarks = {entry.key for entry in report.entries if entry.note == "comment: its name starts with _"}
    assert remarks == {"_comment", "zero_optimization._note"} and not report.refused


@pytest.mark.parametrize(
    "section", ["flops_profiler", "activation_checkpointing", "tensor_parallel", "nebula"]
)
def test_a_section_of_one_rule_may_have_a_remark(section: str) -> None:
    _, report = examine(settings(**{section: {"_why": {"of": "ours"}, "enabled": False}}))
    notes = {entry.key: entry.note for entry in report.entries if "_why" in entry.key}
    assert notes == {f"{section}._why": "comment: its name starts with _"}
    assert all("_why" not in entry.key for entry in report.refused)


def test_a_schedule_of_no_steps_has_no_effect_where_there_is_no_optimizer() -> None:
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": 0, "warmup_num_steps": 0}}
    config, report = load({"train_batch_size": 1, "scheduler": schedule})
    assert config.scheduler is None and not report.refused
    _, trained = examine(settings(scheduler=schedule, **adam(lr=1e-3)))
    assert [entry.key for entry in trained.refused] == ["scheduler.params.total_num_steps"]


def test_parameters_that_a_stage_keeps_are_told_and_no_reason_to_fail() -> None:
    offload = {"offload_param": {"device": "nvme", "nvme_path": "$UNSET_HERE/x"}}
    config, report = load(settings(zero_optimization={"stage": 2, **offload}))
    assert config.zero == load(settings(zero_optimization={"stage": 2}))[0].zero
    assert [entry.key for entry in report.without_effect] == ["zero_optimization.offload_param.device"]
    assert load(settings(zero_optimization=offload))[0].zero.stage == 0
    for wrong in ({"device": "disk"}, {"device": "cpu", "buffers": 4}):  # is still told
        _, report = examine(settings(zero_optimization={"stage": 2, "offload_param": wrong}))
        assert len(report.refused) == 1


def test_params_of_what_is_not_here_are_no_mistake_where_an_object_is_given() -> None:
    """The remedy for type RMSprop is initialize(optimizer=torch.optim.RMSprop(...)), with the file as it is."""
    file = adam("RMSprop", alpha=0.9) | {"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 9}}}
    _, report = examine(file)
    assert [entry.key for entry in report.refused] == ["optimizer.type", "scheduler.type"]
    config, report = load(file, context=LoadContext(replaced=frozenset({"optimizer", "scheduler"})))
    assert (config.optimizer, config.scheduler, report.without_effect) == (None, None, ())
