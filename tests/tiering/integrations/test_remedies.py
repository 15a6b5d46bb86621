"""Errors of a front end name remedies that its user can carry out."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tiering._remedies
from tiering.errors import CheckpointError
from tiering.integrations import _remedies
from tiering.integrations._remedies import named_by

from .trainers import config, llama, tiered

REMEDIES = {value for name, value in vars(tiering._remedies).items() if name.isupper()}
FRONT_ENDS: dict[str, set[str]] = {
    # By each table: the remedies of errors that its front end cannot raise.
    "TRAINER": {tiering._remedies.NEW_SCHEDULE},
    "ACCELERATOR": {tiering._remedies.CONFIGURED_VALUE},
    "LIGHTNING": {tiering._remedies.NEW_SCHEDULE, tiering._remedies.CONFIGURED_VALUE},
    "FABRIC": {tiering._remedies.NEW_SCHEDULE, tiering._remedies.CONFIGURED_VALUE},
}


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_a_front_end_has_words_for_each_remedy(name: str) -> None:
    words: dict[str, str] = getattr(_remedies, name)
    assert set(words) == REMEDIES - FRONT_ENDS[name]
    with pytest.raises(CheckpointError) as raised, named_by(words):
        raise CheckpointError(f"the file is damaged; {'; '.join(words)}")
    assert str(raised.value) == f"[TIER-CHECKPOINT] the file is damaged; {'; '.join(words.values())}"
    assert raised.value.message == f"the file is damaged; {'; '.join(words.values())}"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("accelerate", r"needs accelerate; install it with `pip install 'tiering\[accelerate\]'`"),
        ("lightning", r"needs lightning; install it with `pip install 'tiering\[lightning\]'`"),
        ("transformers", r"needs transformers 5.7 or newer, and accelerate; .*'tiering\[hf\]'`"),
    ],
)
def test_a_missing_library_is_named_with_its_extra(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"tiering.integrations.{name}", raising=False)
    # The import of a name whose module is None fails. Of lightning, a module inside may be imported already.
    monkeypatch.setitem(
        sys.modules, {"lightning": "lightning.fabric.plugins.precision"}.get(name, name), None
    )
    with pytest.raises(ImportError, match=f"tiering.integrations.{name} {message}"):
        importlib.import_module(f"tiering.integrations.{name}")


@pytest.mark.slow
def test_a_trainer_with_another_optimizer_is_told_what_to_do(tmp_path: Path) -> None:
    def trainer(**options: Any) -> Any:
        return tiered(tmp_path / "out", config("cpu", tmp_path), max_steps=2, **options)

    first = trainer(save_strategy="steps", save_steps=2)
    first.train()
    first.engine.close()
    other = trainer(optim="adagrad")
    with pytest.raises(CheckpointError, match=r"load the model from that folder with from_pretrained"):
        other.train(resume_from_checkpoint=True)
    other.engine.close()
    # As told.
    model = llama().from_pretrained(tmp_path / "out/checkpoint-2")
    assert model.dtype == torch.float32
    again = tiered(tmp_path / "new", config("cpu", tmp_path), model, max_steps=2, optim="adagrad")
    again.train()
    assert again.state.global_step == 2
    again.engine.close()
