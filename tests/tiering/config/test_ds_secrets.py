"""What others see of a configuration: every value in effect with its origin, and no secret."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tiering.config.ds_config import load
from tiering.config.ds_config.secrets import HIDDEN, without_secrets
from tiering.telemetry import Description


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("comet.api_key", "k"),
        ("service.API-Key", "k"),
        ("service.apiKey", "k"),
        ("hub_token", "hf_x"),
        ("tokens", ["hf_x"]),
        ("db.password", 1234),
        ("db.passwd", "x"),
        ("client_secret", {"a": 1}),
        ("credentials.user", "x"),
        ("awsSecretAccessKey", "x"),
        ("monitor.host", "https://me:pw@example.org/x"),
        ("monitor.host", "see HTTPS://token@example.org"),
    ],
)
def test_secrets_are_hidden(key: str, value: Any) -> None:
    assert without_secrets(key, value) == HIDDEN


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_tokens", 512),
        ("token", None),
        ("password", ""),
        ("use_auth", True),
        ("tokenizer", "gpt2"),
        ("optimizer.type", "AdamW"),
        ("nvme_path", "/mnt/nvme@0/a"),
        ("url", "https://example.org/a@b"),
        ("keys", ["a", 1, {"compass": "north"}]),
    ],
)
def test_what_is_no_secret_is_shown(key: str, value: Any) -> None:
    assert without_secrets(key, value) == value


def test_secrets_are_found_inside_of_sections() -> None:
    inside = {"steps": 3, "login": [{"password": "p", "user": "u"}], "url": "ftp://u@h"}
    assert without_secrets("extra", inside) == {
        "steps": 3,
        "login": [{"password": HIDDEN, "user": "u"}],
        "url": HIDDEN,
    }


def test_a_page_tells_every_value_in_effect_and_its_origin_but_no_secret() -> None:
    config, report = load(
        {
            "train_batch_size": 4,
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_clipping": 0.5,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "comet": {"enabled": False, "api_key": "xyzzy", "project": "p\ud800", "mode": float("inf")},
            "csv_monitor": {"enabled": False, "output_path": "s3://user:xyzzy@bucket/x"},
        }
    )
    text = Description(configuration=report.status()).to_json()
    assert "xyzzy" not in text
    configuration = Description.from_json(text).configuration
    assert configuration is not None
    assert configuration.outcome == report.outcome
    settings = {setting.key: setting for setting in configuration.settings}
    assert len(settings) == len(report.entries) + len(report.defaults)
    clipping, micro = settings["gradient_clipping"], settings["train_micro_batch_size_per_gpu"]
    assert (clipping.value, clipping.origin, clipping.verdict) == (0.5, "file", "honoured")
    assert (micro.value, micro.origin) == (config.micro_batch_size, "auto")
    stage = settings["zero_optimization.stage"]
    assert (stage.value, stage.origin) == (config.zero.stage, "default")
    assert json.dumps([setting.value for setting in configuration.settings]).count(HIDDEN) == 2
