"""``tiering check``, called by a user at a terminal and by a program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiering.cli import main

Check = Callable[..., tuple[int, str, str]]

TRAINERS = """{
  // a file for a trainer
  "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": "auto",
  "bf16": {"enabled": "auto"},
  "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
  "zero_optimization": {
    "stage": 3,
    "overlap_comm": true,
    "allgather_bucket_size": 5e8,
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
  },
}
"""


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Check:
    """Exit code, stdout and stderr of ``tiering check`` for a file with ``text``."""

    def run(text: str | dict[str, Any], *flags: str, columns: int = 140) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        path = tmp_path / "ds.json"
        path.write_text(text if isinstance(text, str) else json.dumps(text, indent=1), encoding="utf-8")
        capsys.readouterr()
        code = main(["check", str(path), *flags])
        out, err = capsys.readouterr()
        return code, out, err.replace(str(tmp_path), "DIR")

    return run


GOOD = {"train_batch_size": 4, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}


def test_a_file_that_loads(check: Check) -> None:
    code, out, err = check(GOOD)
    assert (code, err) == (0, "")
    row = next(line.split() for line in out.splitlines() if "zero_optimization.stage" in line)
    assert row[:4] == ["zero_optimization.stage", "3", "honoured", "file"]
    assert "batch 4, fp32, ZeRO stage 3, AdamW, gradients clipped at 1" in out
    assert out.endswith("3 honoured\n")


def test_a_file_that_does_not(check: Check) -> None:
    code, out, err = check(GOOD | {"train_batchsize": 1, "amp": {"enabled": True}})
    assert code == 1
    assert err.splitlines() == [
        "DIR/ds.json:9: refused: train_batchsize: unknown key; did you mean train_batch_size?",
        (
            "DIR/ds.json:10: refused: amp: unknown to both DeepSpeed 0.19 and tiering; delete the line"
            ' "amp": {"enabled": true}'
        ),
    ]
    assert "3 honoured, 2 refused" in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "not a JSON object"),
        ('{"a": }', "line 1 column 7"),
        ('{"fp16": {}, "fp16": {}}', "'fp16' appears twice"),
        ('{"a": "\udcff"}', "no UTF-8"),
        ("", "not valid JSON"),
    ],
)
def test_a_file_that_cannot_be_read(check: Check, tmp_path: Path, text: str, message: str) -> None:
    if "\udcff" in text:
        (tmp_path / "odd.json").write_bytes(text.encode(errors="surrogateescape"))
        assert main(["check", str(tmp_path / "odd.json")]) == 2
        return
    code, out, err = check(text)
    assert (code, out) == (2, "")
    assert message in err


def test_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "missing.json")]) == 2
    assert "cannot read the configuration file" in capsys.readouterr().err


def test_strict_is_about_keys_that_do_nothing(check: Check) -> None:
    old = {
        "zero_optimization": {
            "stage": 2,
            "cpu_offload": True,
            "allgather_bucket_size": 5e8,
            "overlap_comm": True,
        }
    }
    code, out, err = check(GOOD | old)
    assert (code, err) == (0, "")
    assert "3 honoured, 2 no effect, 1 deprecated" in out
    code, _, err = check(GOOD | old, "--strict")
    assert code == 1
    lines = [line.split(": ")[1:3] for line in err.splitlines()]
    # overlap_comm is missing: its value true is the only behaviour.
    assert lines == [
        ["no effect", "zero_optimization.allgather_bucket_size"],
        ["deprecated", "zero_optimization.cpu_offload"],
    ]
    assert check(GOOD, "--strict")[0] == 0


def test_ranks_share_a_batch(check: Check, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    assert check(config, "--ranks", "8")[0] == 0
    code, _, err = check(config, "--ranks", "4")
    assert code == 1
    assert "2 x 1 x 4 ranks is 8; set only two of the three" in err
    with pytest.raises(SystemExit):
        check(config, "--ranks", "0")
    assert "must be at least 1, not 0" in capsys.readouterr().err


def test_auto_is_filled_in_or_somebody_has_to(check: Check, tmp_path: Path) -> None:
    code, _, err = check(TRAINERS)
    assert code == 1
    assert [line.split(": ")[2] for line in err.splitlines()] == [
        "train_micro_batch_size_per_gpu",
        "optimizer.params.lr",
    ]
    assert "initialize(args=...) with learning_rate" in err
    model = tmp_path / "config.json"
    model.write_text(json.dumps({"hidden_size": 100, "dtype": "bfloat16"}), encoding="utf-8")
    arguments = ("learning_rate=2e-5", "per_device_train_batch_size=4")
    code, out, _ = check(TRAINERS, "--ranks", "2", "--model", str(model), "--json", "--args", *arguments)
    assert code == 0
    keys = {each["key"]: each for each in json.loads(out)["keys"]}
    zero = "zero_optimization.stage3_"
    assert {key: each["value"] for key, each in keys.items() if each["from"] == "auto"} == {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "bf16.enabled": True,
        "optimizer.params.lr": 2e-5,
        "optimizer.params.weight_decay": 0.0,
        f"{zero}prefetch_bucket_size": 9000,
        f"{zero}param_persistence_threshold": 1000,
    }
    assert keys["optimizer.params.lr"]["here"] == "args.learning_rate"
    assert keys[f"{zero}prefetch_bucket_size"]["here"] == "0.9 h^2, h = 100"


def test_a_trainer_will_fill_in_the_rest(check: Check, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = check(TRAINERS, "--trainer", "hf")
    assert (code, err) == (0, "")
    assert (
        "batch of the trainer, precision of the trainer, ZeRO stage 3, AdamW, gradients clipped at 1" in out
    )
    row = next(line.split() for line in out.splitlines() if "optimizer.params.lr" in line)
    assert row[:4] == ["optimizer.params.lr", '"auto"', "honoured", "trainer"]
    assert " ".join(row[4:]) == "filled by the trainer: learning_rate"
    code, out, _ = check(TRAINERS, "--trainer", "hf", "--json", "--args", "learning_rate=2e-5")
    keys = {each["key"]: each for each in json.loads(out)["keys"]}
    assert (code, keys["optimizer.params.lr"]["from"], keys["optimizer.params.lr"]["value"]) == (
        0,
        "auto",
        2e-5,
    )
    assert (keys["train_batch_size"]["from"], keys["train_batch_size"]["value"]) == ("trainer", "auto")
    code, _, err = check(TRAINERS.replace('"stage"', '"stagee"'), "--trainer", "hf")
    assert code == 1 and "did you mean" in err
    with pytest.raises(SystemExit):
        check(TRAINERS, "--trainer", "other")
    assert "invalid choice: 'other'" in capsys.readouterr().err


def test_json_has_everything(check: Check) -> None:
    code, out, _ = check(
        GOOD | {"steps_per_print": float("inf"), "flops_profiler": {"enabled": False}}, "--json"
    )
    report = json.loads(out, parse_constant=pytest.fail)
    assert (report["schema_version"], report["version"], report["exit_code"], code) == (1, 1, 0, 0)
    assert report["counts"] == {"honoured": 4, "mapped": 0, "no effect": 1, "deprecated": 0, "refused": 0}
    assert report["keys"][-1] == {
        "key": "flops_profiler",
        "value": {"enabled": False},
        "class": "no effect",
        "from": "file",
        "here": "published as telemetry, which tierd shows",
        "off": True,
        "line": 10,
    }
    defaults = {each["key"]: each["value"] for each in report["defaults"]}
    assert defaults["gradient_clipping"] == 1.0
    assert "bf16.enabled" not in defaults, "it selects one of three precisions, and has no default"
    assert defaults["train_micro_batch_size_per_gpu"] == 4
    assert defaults["zero_optimization.offload_optimizer.device"] == "none"
    assert not {each["key"] for each in report["keys"]} & set(defaults)


def test_narrow_terminals_have_a_line_for_what_it_does(check: Check) -> None:
    _, out, _ = check(TRAINERS, "--args", "learning_rate=1", "per_device_train_batch_size=1", columns=80)
    lines = [line.rstrip() for line in out.splitlines()]
    assert max(map(len, lines)) <= 80
    index = lines.index("zero_optimization.overlap_comm = true  no effect")
    assert lines[index + 1] == "    collectives always overlap compute"


def test_all_shows_what_the_file_does_not_set(check: Check) -> None:
    assert "tiering.host_budget" not in check(GOOD)[1]
    row = next(line.split() for line in check(GOOD, "--all")[1].splitlines() if "tiering.host_budget" in line)
    assert row[1:4] == ['"auto"', "honoured", "default"]


def test_whoever_reads_may_have_seen_enough(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(GOOD), encoding="utf-8")
    reads, writes = os.pipe()
    os.close(reads)
    for flags in ([], ["--json"]):
        command = [sys.executable, "-m", "tiering.cli", "check", str(file), *flags]
        process = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True, check=False)
        assert (process.returncode, process.stderr) == (141, "")
    os.close(writes)


def test_a_configuration_may_come_from_another_program() -> None:
    command = [sys.executable, "-m", "tiering.cli", "check", "-", "--json"]
    process = subprocess.run(command, input=json.dumps(GOOD), capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")
    assert json.loads(process.stdout)["outcome"].startswith("batch 4")


def test_names_reach_a_terminal_as_it_can_show_them() -> None:
    file = json.dumps(GOOD | {"ключ": 1, "\x1b[31mred": 2, "": 3, "a.b": 4}, ensure_ascii=False)
    command = [sys.executable, "-m", "tiering.cli", "check", "-"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "140"}
    process = subprocess.run(command, input=file.encode(), capture_output=True, env=environment, check=False)
    assert process.returncode == 1
    assert r"\u043a\u043b\u044e\u0447" in process.stdout.decode("ascii")
    assert b"\x1b" not in process.stdout + process.stderr
    keys = [line.split(": ")[2] for line in process.stderr.decode().splitlines()]
    assert keys == [r"\u043a\u043b\u044e\u0447", r'"\u001b[31mred"', '""', '"a.b"']
