"""The command on a real directory: what it measures and writes, what it tells, and how it ends early."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.fakes.fake_drive import FakeDrive, flat, peaked, played
from tests.tiering.tierbench import results
from tiering.config.ds_config import load
from tiering.config.training import IoConfig
from tiering.errors import ConfigError, SwapError
from tiering.tierbench import cli
from tiering.tierbench.load.windows import Load
from tiering.tierbench.result import Machine, Row, Settings
from tiering.tierbench.tuning import search as sweep
from tiering.tierbench.tuning import tune, tuning_result
from tiering.tierbench.tuning.search import Sweep
from tiering.tierbench.tuning.tuning_result import TuningResult, show
from tiering.tierbench.words import brief

MIB = 1 << 20
QUICK = ("--size", "64M", "--quiet", "--bs", "1M")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "INTERVAL_SECONDS", 0.03)
    monkeypatch.setattr(tune, "RAMP_SECONDS", 0.0)


def io_of(block: dict[str, Any]) -> IoConfig:
    return load({"train_micro_batch_size_per_gpu": 1, **block})[0].tiering.io


def test_all_that_was_read_is_told_and_the_block_is_what_is_recommended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune, "PREPARATION_SHARE", 20.0)  # files are written whole, however busy the disk is
    monkeypatch.setattr(sweep, "_DISTURBED_RATIO", 100.0)  # and readings count
    monkeypatch.setattr(sweep, "_STALL_SHARE", 0.0)
    config = tmp_path / "ds.json"
    config.write_text('{\n  "train_batch_size": 16, // as before\n}\n')
    where = tmp_path / "swap"
    where.mkdir()
    code = cli.main(
        [
            "tune",
            str(where),
            *QUICK,
            *("--write-config", str(config)),
            "--json",
            "--runtime",
            "0.8",
            "--bs",
            "64K,1M",
            "--iodepth",
            "4,16",
        ]
    )
    captured = capsys.readouterr()
    assert code == 0
    assert "set tiering.io" in captured.err
    result = TuningResult.model_validate_json(captured.out)
    assert json.loads(captured.out)["schema_version"] == 1
    assert (result.kind, result.rw, result.size) == ("tune", "rw", 64 * MIB)
    assert [target.directory for target in result.targets] == [str(where)]
    tried = {each.cell: each for each in result.tried}
    assert len(tried) == len(result.tried) >= 3
    assert {cell.bs for cell in tried} <= {64 << 10, MIB}
    assert {cell.iodepth for cell in tried} <= {4, 16}
    assert result.defaults.cell[1:] == (MIB, 16, True)
    assert [each.ratio.point for each in result.tried] == sorted(
        (each.ratio.point for each in result.tried), reverse=True
    )
    for each in result.tried:
        assert each.readings
        assert each.ratio.low <= each.ratio.point <= each.ratio.high
        assert each.in_flight == each.bs * each.iodepth
    windows = sum(len(each.readings) for each in result.tried)
    assert result.written_bytes > 64 * MIB + windows * MIB
    used = io_of(result.config)
    assert (used.block_size, used.queue_depth, used.registered) == result.recommended.cell[1:]
    same = result.recommended.ioengine == result.defaults.ioengine
    assert used.engine == ("auto" if same else result.recommended.ioengine)
    assert load(config)[0].tiering.io == used
    assert "// as before" in config.read_text()
    assert not list(where.iterdir())


def test_max_write_ends_it_and_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tune", str(tmp_path), "--quiet", "--json", "--bs", "1M", "--iodepth", "4"]
    assert cli.main([*arguments, "--runtime", "20", "--max-write", "150M"]) == 0
    result = TuningResult.model_validate_json(capsys.readouterr().out)
    assert result.ended == "--max-write 150.00 MiB was reached"
    assert result.size <= 75 * MIB
    assert result.written_bytes <= 150 * MIB
    assert cli.main([*arguments, "--max-write", "20M"]) == 2
    assert "give at least 130.00 MiB" in capsys.readouterr().err


def test_an_engine_that_cannot_start_is_told_and_the_rest_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Poor(Load):
        def __init__(self, work_files: Any, settings: Settings) -> None:
            if settings.ioengine == "libaio":
                raise SwapError("aio-max-nr is used up; raise it", errno=11, filename="", offset=0)
            super().__init__(work_files, settings)

    monkeypatch.setattr(tune, "Load", Poor)
    monkeypatch.setattr(tune, "PREPARATION_SHARE", 20.0)  # files are written whole, however busy the disk is
    arguments = ["tune", str(tmp_path), *QUICK, "--runtime", "0.7", "--iodepth", "4"]
    assert cli.main([*arguments, "--ioengine", "libaio,threads"]) == 0
    output = capsys.readouterr().out
    assert "Not measured: libaio: aio-max-nr is used up; raise it." in " ".join(output.split())
    assert "threads" in output
    assert cli.main([*arguments, "--ioengine", "libaio"]) == 2
    assert "engines that start here: none" in capsys.readouterr().err


def test_ctrl_c_prints_what_there_is_and_writes_no_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "ds.json"
    config.write_text("{}")
    windows = 0

    def run(load: Load, *arguments: Any, **others: Any) -> Row:
        nonlocal windows
        windows += 1
        row = real(load, *arguments, **others)
        return row.model_copy(update={"complete": windows < 6})

    real = Load.run
    monkeypatch.setattr(Load, "run", run)
    arguments = ["tune", str(tmp_path), *QUICK, "--iodepth", "4", "--rw", "read", "--runtime", "20"]
    assert cli.main([*arguments, "--write-config", str(config)]) == 130
    output = capsys.readouterr().out
    assert output.startswith("interrupted: these are the measurements so far")
    assert "No recommendation" in output and "to paste into a configuration" not in output
    assert config.read_text() == "{}"
    windows = 5  # at the first
    assert cli.main(arguments) == 130
    assert "before the first measurement" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ioengine", "auto"], "auto is the baseline of the comparison"),
        (["--bs", "1000"], "a multiple of 4096"),
        (["--iodepth", "0,4"], "choose 1 .. 512"),
        (["--iodepth", "many"], "whole numbers"),
        (["--write-config", "/nowhere/ds.json"], "cannot be read"),
    ],
)
def test_what_cannot_be_swept_is_told_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    try:
        code = cli.main(["tune", str(tmp_path), *arguments])
    except SystemExit as end:
        code = end.code
    assert code == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert not captured.out


def test_short_preparation_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Load, "lay_out", lambda load, **others: ROW)
    with pytest.raises(ConfigError, match="give a longer --runtime"):
        tune.tune(tune.TuneRequest((tmp_path,), size=64 * MIB))


ROW = Row.model_validate(
    {
        "rw": "write",
        "seconds": 1,
        "read": {},
        "write": {},
        "cpu_seconds": 0,
        "worst_second": None,
        "paths": (),
    }
)


def printed(sweep: Sweep, width: int) -> str:
    result = tuning_result.result_of(
        sweep,
        {"io_uring": "forbidden"},
        ended="the time limit was reached",
        interrupted=False,
        seconds=60.0,
        read_bytes=10**10,
        written_bytes=2 * 10**10,
        rw="rw",
        size=2 << 30,
        window=0.4,
        version="1",
        date="",
        command="",
        machine=Machine.this(),
        targets=(results.target("/odd [name]\x1b[2J", results.NVME.targets[0].backing),),
        notes=("/data: an overlay",),
        config={"tiering": {"io": {"engine": "libaio"}}},
    )
    out = io.StringIO()
    show(result, Console(file=out, width=width))
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_a_table_fits_and_says_what_it_comes_to(width: int) -> None:
    sweep, _ = played(FakeDrive(peaked, noise=0.01, swings=False))
    table = printed(sweep, width)
    assert max(map(len, table.splitlines())) <= width
    assert "…" not in table and "\x1b" not in table
    assert "/odd [name]\\x1b[2J: reads and writes at once" in table.splitlines()
    rows = [
        line
        for line in table.splitlines()
        if line.startswith(("io_uring ", "io_uring,", "libaio ", "threads "))
    ]
    assert 4 <= len(rows) <= tuning_result.ROWS
    assert sum("the defaults" in row for row in rows) == 1
    text = " ".join(table.split())
    best = sweep.verdict().recommended.cell
    assert f"Use {best}: its rate is 1." in text
    assert f"It has {brief(best.in_flight)} in flight and a p99 of" in text
    assert f"of {len(sweep.readings) + 1} settings are as fast as {best}, or at most 5% slower" in text
    assert "Not measured: io_uring: forbidden." in text
    assert "Note: /data: an overlay." in text
    assert "Written: 20.0 GB, read: 10.0 GB" in text


def test_that_the_defaults_are_as_good_is_said_and_what_would_be_cheaper() -> None:
    text = " ".join(printed(played(FakeDrive(flat, noise=0.01, swings=False))[0], 120).split())
    assert "Keep the defaults, io_uring 1M x 16: no setting is faster." in text
    assert "blocks of 128K .. 4M (at depth 16) and depths 4 .. 64 (at 1M) are equally fast" in text
    noisy = " ".join(printed(played(FakeDrive(flat, noise=0.3))[0], 120).split())
    assert "a longer --runtime reduces the error" in noisy
