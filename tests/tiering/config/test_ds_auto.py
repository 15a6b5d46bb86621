"""What "auto" is filled in with."""

from __future__ import annotations

from typing import Any

import pytest

from tiering.config.ds_config import LoadContext, Origin, load
from tiering.config.training import TieringConfig
from tiering.errors import ConfigError

from .ds_cases import MINIMAL, changed, entry, refusal


def test_auto_that_only_a_trainer_can_fill_is_refused() -> None:
    message = refusal(changed("optimizer.params.lr", "auto"))
    assert (
        "optimizer.params.lr: 'auto' needs a trainer's argument: set a number, or pass initialize(args=...)"
        in message
    )
    for path in ("zero_optimization.stage", "steps_per_print", "dataloader_drop_last"):
        assert f"{path}: 'auto' is only for keys that a trainer fills in; set a value" in refusal(
            changed(path, "auto")
        )


def test_auto_is_filled_in_from_what_is_known() -> None:
    settings = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": "auto", "total_num_steps": "auto", "warmup_max_lr": "auto"},
        },
    }
    arguments = {
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.25,
        "max_grad_norm": 0,
        "adam_beta1": 0.5,
        "adam_beta2": 0.75,
        "weight_decay": 0.125,
        "warmup_ratio": 0.1,
        "max_steps": 105,
    }
    config, report = load(settings, world_size=4, context=LoadContext(arguments=arguments, dtype="bf16"))
    assert {
        entry.origin for entry in report.entries if entry.key not in {"optimizer.type", "scheduler.type"}
    } == {Origin.AUTO}
    assert config == TieringConfig.model_validate(
        {
            "train_batch_size": 24,
            "micro_batch_size": 3,
            "gradient_accumulation_steps": 2,
            "world_size": 4,
            "precision": "bf16",  # as the model's parameters are: no argument says it
            "gradient_clipping": 0.0,
            "optimizer": {"lr": 0.25, "betas": (0.5, 0.75), "weight_decay": 0.125},
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {"warmup_num_steps": 11, "total_num_steps": 105, "warmup_max_lr": 0.25},
            },
        }
    )
    with pytest.raises(
        ConfigError, match=r"total_num_steps: 'auto' .* initialize\(args=...\) with max_steps"
    ):
        load(settings, context=LoadContext(arguments=arguments | {"max_steps": -1, "warmup_steps": 5}))


def test_sections_that_initialize_replaces_ask_for_nothing() -> None:
    settings = MINIMAL | {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    config, report = load(settings, context=LoadContext(replaced=frozenset({"optimizer"})))
    assert config.optimizer is None
    assert entry(report, "optimizer.params.lr").note == "replaced by the optimizer passed to initialize()"
    # a name that is wrong stays wrong
    wrong = settings | {"optimizer": {"type": "AdamW", "params": {"lerning_rate": 1}}}
    with pytest.raises(ConfigError, match=r"optimizer\.params\.lerning_rate: unknown key"):
        load(wrong, context=LoadContext(replaced=frozenset({"optimizer"})))


def test_auto_that_is_known_here_is_filled() -> None:
    config, _ = load(changed("zero_optimization.stage3_param_persistence_threshold", "auto"))
    assert config.zero.persistence_threshold == 10**5
    config, _ = load(changed("tiering.host_budget", "auto"))
    assert config.tiering.host_budget == "auto"


WRITTEN_OUT: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": False},
    "optimizer": {"type": "AdamW", "params": {"lr": 1.0, "betas": [0.9, 0.95], "eps": 1e-8}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}},
}
ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "max_grad_norm": 1.0,
    "bf16": True,
    "learning_rate": 1e-3,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "warmup_steps": 0,
}
FACTORS = "args.per_device_train_batch_size x args.gradient_accumulation_steps x 4 ranks"
MISMATCHES = [
    f"train_batch_size: 64 differs from {FACTORS}, 32",
    "train_micro_batch_size_per_gpu: 8 differs from args.per_device_train_batch_size, 2",
    "gradient_accumulation_steps: 2 differs from args.gradient_accumulation_steps, 4",
    "gradient_clipping: 0.5 differs from args.max_grad_norm, 1.0",
    "bf16.enabled: false differs from args.bf16, true",
    "optimizer.params.lr: 1.0 differs from args.learning_rate, 0.001",
    "optimizer.params.betas: [0.9, 0.95] differs from args.adam_beta1, args.adam_beta2, [0.9, 0.999]",
    "scheduler.params.warmup_num_steps: 7 differs from args.warmup_steps, 0",
]


class TrainingArguments:
    """As transformers' class of that name, or a subclass of it."""

    def __init__(self, **arguments: Any) -> None:
        self.__dict__.update(arguments)


def test_all_values_that_differ_from_a_trainers_arguments_are_in_one_error() -> None:
    context = LoadContext(arguments=TrainingArguments(**ARGUMENTS))
    with pytest.raises(ConfigError) as refusals:
        load(WRITTEN_OUT, world_size=4, context=context)
    lines = str(refusals.value).splitlines()
    assert lines[0] == "[TIER-CONFIG] 8 problems in the configuration:"
    assert [line.strip().partition(";")[0] for line in lines[1:]] == MISMATCHES
    assert all("pass strict_args=False to initialize()" in line for line in lines[1:])


def test_values_may_differ_from_arguments_if_the_caller_allows_it() -> None:
    context = LoadContext(arguments=TrainingArguments(**ARGUMENTS), strict=False)
    config, _ = load(WRITTEN_OUT, world_size=4, context=context)
    assert (config.micro_batch_size, config.gradient_accumulation_steps) == (8, 2)
    assert config.optimizer is not None and config.optimizer.lr == 1.0 and config.precision == "fp32"


def test_arguments_of_a_script_concern_only_a_file_with_auto() -> None:
    """DeepSpeed's scripts have arguments of the same names, beside a file that does not refer to them."""
    context = LoadContext(arguments=ARGUMENTS)
    config, _ = load(WRITTEN_OUT, world_size=4, context=context)
    assert config.micro_batch_size == 8
    with pytest.raises(ConfigError, match=r"gradient_clipping: 0\.5 differs from args\.max_grad_norm, 1\.0"):
        load(WRITTEN_OUT | {"bf16": {"enabled": "auto"}}, world_size=4, context=context)


def test_equal_values_in_other_forms_agree_with_arguments() -> None:
    agreeing: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1,
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "betas": (0.9, 0.999), "weight_decay": 0.1}},
        # Trainers fill in one step for none.
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1}},
    }
    context = LoadContext(arguments=TrainingArguments(**ARGUMENTS))
    config, _ = load(agreeing, world_size=4, context=context)
    assert config.train_batch_size == 32
    replaced = LoadContext(arguments=context.arguments, replaced=frozenset({"optimizer"}))
    load(agreeing | {"optimizer": WRITTEN_OUT["optimizer"]}, world_size=4, context=replaced)


def test_a_trainer_that_evaluates_in_16_bits_computes_in_them() -> None:
    arguments = TrainingArguments(bf16=False, bf16_full_eval=True, per_device_train_batch_size=1)
    for enabled in ("auto", True):
        config, _ = load(
            {"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": enabled}},
            context=LoadContext(arguments=arguments),
        )
        assert config.precision == "bf16"


def test_the_filled_configuration_has_no_auto() -> None:
    settings: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "steps_per_print": None,
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": "auto",
            "reduce_bucket_size": "auto",
            "allgather_bucket_size": "auto",
        },
        "tiering": {"host_budget": "auto"},
    }
    context = LoadContext(
        hidden_size=16,
        dtype="bf16",
        arguments={"per_device_train_batch_size": 3, "learning_rate": 0.25, "warmup_steps": 4},
        replaced=frozenset({"scheduler"}),
    )
    _, report = load(settings, world_size=2, context=context)
    assert report.filled == {
        "train_batch_size": 6,
        "train_micro_batch_size_per_gpu": 3,
        "steps_per_print": None,
        "bf16": {"enabled": True},
        # torch's and DeepSpeed's default.
        "optimizer": {"type": "AdamW", "params": {"lr": 0.25, "eps": 1e-8}},
        "scheduler": {"type": "WarmupLR", "params": {}},
        # The size of a gathered bucket has no effect here.
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 160,
            "reduce_bucket_size": 256,
        },
        "tiering": {"host_budget": "auto"},
    }
    assert settings["bf16"] == {"enabled": "auto"}
