"""What was tried to break the reader of configurations, and did."""

from __future__ import annotations

import base64
import json
from collections import UserDict, UserList
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiering.ds_config import examine, load
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
    ("given", "message"),
    [
        (None, "not NoneType"),
        (b"{}", "not bytes"),
        ("a\0b", "embedded null byte"),
        ("x" * 5000, "File name too long"),
        (json.dumps(WHOLE) * 10, r"\.\.\..*No such file"),
    ],
)
def test_what_is_no_configuration_is_told_in_a_line(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        examine(given)
    assert len(str(caught.value)) < 400


def test_values_of_other_libraries_are_those_of_json() -> None:
    """As OmegaConf and numpy have them: mappings and sequences that are no dict and no list, scalars, arrays."""
    given = UserDict(
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
    assert load(given)[0] == load(WHOLE)[0]
    for path in ("gradient_clipping", "amp", "steps_per_print"):  # a question to an array has no answer
        _, report = examine({"train_batch_size": 8, path: np.array([1, 2])})
        assert [entry.key for entry in report.refused] == [path]


def test_what_holds_itself_is_no_configuration(tmp_path: Path) -> None:
    circle: dict[str, Any] = {"train_batch_size": 8}
    circle["datastates_ckpt"] = {"of": circle}
    file = tmp_path / "deep.json"
    file.write_text('{"checkpoint": ' * 600 + "1" + "}" * 600, encoding="utf-8")
    for given in (circle, file):
        with pytest.raises(ConfigError, match="nested deeper than 100 levels"):
            examine(given)
