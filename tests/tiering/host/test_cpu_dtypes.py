"""A warning for CPUs that compute slowly in 16 bits. Times are stand-ins."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pytest
import torch
from torch import nn

import tiering
from tiering.config.training import TieringConfig
from tiering.host import cpu_dtypes
from zero3.params import precision

BF16 = {"bf16": {"enabled": True}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}


@pytest.mark.parametrize(
    ("times", "config", "named"),
    [
        (70.0, BF16, '"bf16": {"enabled": false}'),
        (8.0, AUTOCAST, '"torch_autocast": {"enabled": false}'),
        (7.9, BF16, None),
        (70.0, {}, None),
    ],
)
def test_a_slow_dtype_is_named_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    times: float,
    config: Mapping[str, object],
    named: str | None,
) -> None:
    seconds = {torch.float32: 1e-4, torch.bfloat16: times * 1e-4}
    monkeypatch.setattr(cpu_dtypes, "_product_seconds", seconds.__getitem__)
    monkeypatch.setattr("zero3.initialize.warn_if_slow", precision.warn_if_slow)
    cpu_dtypes.slowdown.cache_clear()
    caplog.set_level(logging.WARNING)
    batch = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    engine, *_ = tiering.initialize(model=nn.Linear(4, 4), config=batch | config)
    engine.close()
    cpu_dtypes.slowdown.cache_clear()
    warnings = [text for text in caplog.messages if "no instructions for bf16" in text]
    assert len(warnings) == (named is not None)
    if named:
        assert named in warnings[0]
        assert f"{times:.0f} times as long" in warnings[0]


def test_the_gpu_computes_in_16_bits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu_dtypes, "is_slow", lambda dtype: True)
    caplog.set_level(logging.WARNING)
    settings = TieringConfig(train_batch_size=1, micro_batch_size=1, precision="bf16")
    precision.warn_if_slow(settings, torch.device("cuda"))
    assert not caplog.messages
    precision.warn_if_slow(settings, torch.device("cpu"))
    assert len(caplog.messages) == 1
