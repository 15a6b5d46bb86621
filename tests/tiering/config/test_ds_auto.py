"""What "auto" is filled in with."""

from __future__ import annotations

import pytest

from tiering.config.ds_config import LoadContext, Origin, load
from tiering.config.training import TieringConfig
from tiering.errors import ConfigError

from .ds_cases import MINIMAL, changed, entry, refusal


def test_auto_that_only_a_trainer_can_fill_is_refused() -> None:
    told = refusal(changed("optimizer.params.lr", "auto"))
    assert (
        "optimizer.params.lr: 'auto' needs a trainer's argument: set a number, or pass initialize(args=...)"
        in told
    )
    for path in ("zero_optimization.stage", "steps_per_print", "dataloader_drop_last"):
        assert f"{path}: 'auto' is only for keys that a trainer fills in; set a value" in refusal(
            changed(path, "auto")
        )


def test_auto_is_filled_in_from_what_is_known() -> None:
    given = {
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
    config, report = load(given, world_size=4, context=LoadContext(arguments=arguments, dtype="bf16"))
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
        load(given, context=LoadContext(arguments=arguments | {"max_steps": -1, "warmup_steps": 5}))


def test_sections_that_initialize_replaces_ask_for_nothing() -> None:
    given = MINIMAL | {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    config, report = load(given, context=LoadContext(replaced=frozenset({"optimizer"})))
    assert config.optimizer is None
    assert entry(report, "optimizer.params.lr").note == "replaced by the optimizer passed to initialize()"
    # a name that is wrong stays wrong
    wrong = given | {"optimizer": {"type": "AdamW", "params": {"lerning_rate": 1}}}
    with pytest.raises(ConfigError, match=r"optimizer\.params\.lerning_rate: unknown key"):
        load(wrong, context=LoadContext(replaced=frozenset({"optimizer"})))


def test_auto_that_is_known_here_is_filled() -> None:
    config, _ = load(changed("zero_optimization.stage3_param_persistence_threshold", "auto"))
    assert config.zero.persistence_threshold == 10**5
    config, _ = load(changed("tiering.host_budget", "auto"))
    assert config.tiering.host_budget == "auto"
