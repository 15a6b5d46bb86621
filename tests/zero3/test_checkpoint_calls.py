"""save_checkpoint and load_checkpoint as scripts that were written for DeepSpeed call them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiering.errors import ConfigError

from .resuming import Model, train


def begin(start: Callable[..., Any]) -> Any:
    return start(Model(), precision="bf16", accumulation=1, threshold=40)


def test_arguments_stand_where_deepspeed_has_them(start: Callable[..., Any], tmp_path: Path) -> None:
    engine = begin(start)
    train(engine, range(1))
    engine.save_checkpoint(tmp_path, "first", {"epoch": 1}, True)
    train(engine, range(1, 2))
    engine.save_checkpoint(tmp_path, "second", {"epoch": 2}, False)
    path, state = engine.load_checkpoint(tmp_path, None, True, False, True, False, None)
    assert (path, state) == (str(tmp_path / "first"), {"epoch": 1})
    assert engine.global_steps == 2, "load_optimizer_states=False leaves counters"
    assert engine.load_checkpoint(
        tmp_path, tag="second", load_module_strict=True, load_optimizer_states=True, load_lr_scheduler_states=True
    )[1] == {"epoch": 2}  # fmt: skip


@pytest.mark.parametrize("options", [{"load_module_strict": False}, {"custom_load_fn": print}], ids=str)
def test_some_of_a_model_is_another_call(
    start: Callable[..., Any], tmp_path: Path, options: dict[str, Any]
) -> None:
    engine = begin(start)
    engine.save_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"tiering.initialize\(weights=..., strict=False\)"):
        engine.load_checkpoint(tmp_path, **options)
    train(engine, range(1))
