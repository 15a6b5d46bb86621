"""Planning from a transformers configuration: what describes no model is refused in a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiering.errors import ConfigError
from zero3.setup.plan_for import described


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"model_type": "llama", "hidden_size": 63}', "hidden size"),
        ('{"model_type": "llama", "vocab_size": "many"}', "expected int"),
        ('{"model_type": "resnet"}', "ResNetConfig"),
    ],
)
def test_a_configuration_that_does_not_hold_together(tmp_path: Path, text: str, why: str) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=f"describes no model that transformers .*{why}") as refusal:
        described(tmp_path)
    assert len(str(refusal.value)) < 500
