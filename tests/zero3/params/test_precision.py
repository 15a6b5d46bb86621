from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiering
from tiering.config.training import LossScaleConfig, TieringConfig
from tiering.errors import EngineStateError
from zero3.params.precision import COMPUTE_DTYPES, LossScale

TABLES = json.loads((Path(__file__).parents[1] / "deepspeed_tables.json").read_text(encoding="utf-8"))


def from_table(params: dict[str, Any]) -> LossScale:
    return LossScale(
        params["init_scale"],
        dynamic=True,
        window=params["scale_window"],
        hysteresis=params["delayed_shift"],
        consecutive_hysteresis=params.get("consecutive_hysteresis", False),
        minimum=params.get("min_scale", 1),
    )


@pytest.mark.parametrize("table", TABLES["loss_scales"], ids=lambda table: json.dumps(table["params"]))
def test_a_dynamic_scale_moves_as_deepspeeds(table: dict[str, Any]) -> None:
    scale = from_table(table["params"])
    for overflow, value in zip(table["overflows"], table["values"], strict=False):
        if value is None:
            with pytest.raises(EngineStateError, match=f"at its minimum, {scale.value:g}: .* train in bf16"):
                scale.update(bool(overflow))
            return
        scale.update(bool(overflow))
        assert scale.value == value


def test_the_tables_show_every_move() -> None:
    moves = set()
    for table in TABLES["loss_scales"]:
        values = [table["params"]["init_scale"], *table["values"]]
        moves |= {
            "end" if after is None else "up" if after > before else "down" if after < before else "stays"
            for before, after in itertools.pairwise(values)
        }
    assert moves == {"end", "up", "down", "stays"}


def config(**fields: Any) -> TieringConfig:
    return TieringConfig.model_validate({"train_batch_size": 1, "micro_batch_size": 1} | fields)


def test_a_scale_that_is_configured() -> None:
    chosen = LossScaleConfig(initial_power=3, window=2, hysteresis=1, min_scale=4.0)
    scale = LossScale.from_config(config(precision="fp16", loss_scale=chosen))
    values = []
    for overflow in (False, False, False, True, True):
        scale.update(overflow)
        values.append(scale.value)
    assert values == [8.0, 8.0, 16.0, 8.0, 4.0]
    with pytest.raises(EngineStateError):
        scale.update(True)
    assert scale.value == 4.0


def test_defaults_are_deepspeeds() -> None:
    scale = LossScale.from_config(config(precision="fp16"))
    assert scale.value == 65536.0
    scale.update(True)
    assert scale.value == 65536.0  # the first overflow is let pass
    scale.update(True)
    assert scale.value == 32768.0
    for _ in range(1000):
        scale.update(False)
    assert scale.value == 32768.0
    scale.update(False)
    assert scale.value == 65536.0


def test_a_fixed_scale_stays() -> None:
    scale = LossScale.from_config(
        config(
            precision="fp16", loss_scale={"scale": 128.0, "window": 1, "hysteresis": 1, "min_scale": 128.0}
        )
    )
    for overflow in (True, True, False, False, False):
        scale.update(overflow)
        assert scale.value == 128.0


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_without_fp16_nothing_is_scaled(precision: str) -> None:
    scale = LossScale.from_config(
        config(precision=precision, loss_scale={"scale": 128.0, "window": 1, "hysteresis": 1})
    )
    for overflow in (True, True, False, False, False):
        scale.update(overflow)
        assert scale.value == 1.0


def test_autocast_to_fp16_needs_a_scale_too() -> None:
    assert LossScale.from_config(config(autocast="fp16")).value == 65536.0
    assert LossScale.from_config(config(autocast="bf16")).value == 1.0


@pytest.mark.parametrize("after", range(0, 80, 7))
def test_a_resumed_scale_goes_on(after: int) -> None:
    table = TABLES["loss_scales"][0]
    scale, resumed = from_table(table["params"]), from_table(table["params"])
    for overflow in table["overflows"][:after]:
        scale.update(bool(overflow))
    resumed.load_state_dict(json.loads(json.dumps(scale.state_dict())))
    assert resumed.value == scale.value
    for overflow, value in zip(table["overflows"][after:], table["values"][after:], strict=True):
        resumed.update(bool(overflow))
        assert resumed.value == value


def test_a_fixed_scale_is_the_configurations_after_loading_too() -> None:
    scale = LossScale(128.0)
    scale.load_state_dict(LossScale(2.0**16, dynamic=True).state_dict())
    assert scale.value == 128.0


class Routed(nn.Module):
    """A bias beside its parameters that 16 bits cannot hold, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("bias", torch.full((4,), 0.1234567))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.layer(x)) + self.bias).sum()


@pytest.mark.parametrize("buffer_dtype", [None, "fp32", "bf16", "fp16"])
def test_buffers_keep_their_dtype_unless_told(buffer_dtype: str | None) -> None:
    model = Routed()
    data_types = {} if buffer_dtype is None else {"data_types": {"buffer_dtype": buffer_dtype}}
    config = {"train_batch_size": 3, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}} | data_types
    with tiering.initialize(model=model, config=config)[0] as engine:
        dtype = COMPUTE_DTYPES.get(buffer_dtype or "fp32")
        assert (model.bias.dtype, model.steps.dtype) == (dtype, torch.int64)
        assert model.bias.equal(torch.full((4,), 0.1234567).to(dtype))
        assert model.norm.running_mean.dtype is (
            COMPUTE_DTYPES[buffer_dtype] if buffer_dtype else torch.bfloat16
        )
        if buffer_dtype in (None, "bf16"):
            engine.backward(engine(torch.randn(3, 4, dtype=torch.bfloat16)))
            engine.step()
