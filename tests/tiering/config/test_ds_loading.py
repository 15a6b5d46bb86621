"""Where a configuration comes from: files, mappings, what launchers hand over."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from tiering.config.ds_config import load
from tiering.errors import ConfigError

from .ds_cases import ZERO3_NVME, entry


def test_files_mappings_and_what_a_launcher_hands_over_read_the_same(tmp_path: Path) -> None:
    text = json.dumps(ZERO3_NVME, indent=1)
    path = tmp_path / "ds_config.json"
    path.write_text("\ufeff" + text, encoding="utf-8")  # as some editors begin a file
    config, report = load(path)
    (line,) = [at for at, line in enumerate(text.splitlines(), 1) if '"sub_group_size"' in line]
    assert (entry(report, "zero_optimization.sub_group_size").line, report.source) == (line, str(path))
    of_mapping, bare = load(ZERO3_NVME)
    assert (config, report.counts()) == (of_mapping, bare.counts())
    assert load(str(path))[0] == load(base64.urlsafe_b64encode(text.encode()).decode())[0] == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "it is not valid JSON .*line 1"),
        ("[]", "it is not a JSON object"),
        ('{"bf16": {"enabled": true, "enabled": false}}', "'enabled' appears twice"),
        ('{"bf16": {"enabled": true,,}}', "it is not valid JSON .*line 1"),
        ('{"a": 1 /* no end }', "it is not valid JSON"),
        ("{,}", "it is not valid JSON"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"configuration file .*bad\.json cannot be used: {message}"):
        load(path)


def test_a_file_in_no_encoding_that_json_has(tmp_path: Path) -> None:
    (tmp_path / "latin.json").write_bytes('{"run": "é"}'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.json is not valid JSON: it is not UTF-8 text"):
        load(tmp_path / "latin.json")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*none\.json: No such file"):
        load(tmp_path / "none.json")
