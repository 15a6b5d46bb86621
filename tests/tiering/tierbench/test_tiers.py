"""``tierbench tiers``: every leg is told, kept whole or not at all, and `tiering plan` takes what is kept."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiering.cli
from tiering.planning import measure
from tiering.planning.measure import Leg, Measurement, Tell
from tiering.planning.rates import Rates
from tiering.storage import swap_file
from tiering.tierbench import cli, tiers
from zero3.observe import device_rates

MIB = 1 << 20
NVME = ["nvme_read", "nvme_write", "nvme_mixed"]
CPU = ["checksum", "host_copy", "gradients", "optimizer"]
GPU_LEGS = {"flops": 4e14, "to_device": 5e10, "from_device": 4e10, "device_both": 8e10, "device_memory": 3e12}

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is usual takes less here. No GPU, whatever this machine has."""
    monkeypatch.setattr(measure, "FILE_BYTES", 4 * MIB)
    monkeypatch.setattr(measure, "SECONDS", 0.02)
    monkeypatch.setattr(measure, "MOST_KERNEL_BYTES", MIB)
    monkeypatch.setattr(tiers, "DRIVERS", (tmp_path / "no driver",))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.mkdir()
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """``tierbench tiers`` with arguments: (exit code, standard output, standard error)."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        code = cli.main(["tiers", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def saved(tmp_path: Path) -> list[str]:
    return sorted(path.name.partition("-")[0] for path in (tmp_path / "cache").glob("tiering/rates/*"))


def on_device(name: str, legs: dict[str, float]) -> Measurement:
    """A device that is not here."""

    def measured(tell: Tell) -> Rates:
        for leg, rate in legs.items():
            tell(Leg(leg, rate))
        return Rates(flops=legs["flops"])

    return Measurement("device", {"name": name}, measured)


def test_every_leg_is_told_with_what_it_counts(run: Run, disk: Path, tmp_path: Path) -> None:
    code, out, err = run(disk, "--json")
    assert code == 0
    assert err.splitlines() == [
        (
            "tierbench tiers: writes 4.00 MiB, then for 0.04 s as fast as the drives accept data;"
            " --max-write limits the bytes"
        ),
        *("measuring: CPU", "measuring: disks"),
    ]
    report = json.loads(out)
    assert (report["schema_version"], report["kind"], report["interrupted"]) == (1, "tiers", False)
    assert sorted(report) == [
        *("date", "interrupted", "kind", "legs", "machine", "notes", "saved", "schema_version"),
        *("settings", "targets", "version", "written_bytes"),
    ]
    assert [leg["name"] for leg in report["legs"]] == NVME + CPU  # from the drive to the device
    assert all(sorted(leg) == ["name", "rate", "threads", "unit", "use"] for leg in report["legs"])
    assert all(leg["rate"] > 0 for leg in report["legs"])
    units = {leg["name"]: leg["unit"] for leg in report["legs"]}
    assert {name for name, unit in units.items() if unit == "elements"} == {"gradients", "optimizer"}
    threads = {leg["name"]: leg["threads"] for leg in report["legs"]}
    assert threads["nvme_read"] == 1
    assert (
        threads["optimizer"] == threads["host_copy"] == threads["checksum"] == measure.kernels.thread_count()
    )
    # Once to have been written, then for at least one slot of a sixth of that in each of the two windows that write.
    assert report["written_bytes"] >= 4 * MIB + 2 * (4 * MIB // 6 // 4096 * 4096)
    assert report["targets"][0]["directory"] == str(disk)
    assert any(note.startswith("no GPU driver was found") for note in report["notes"])
    assert list(disk.iterdir()) == []
    assert report["saved"] and saved(tmp_path) == ["cpu", "disks"]


def test_what_is_saved_is_what_a_plan_of_this_machine_takes(
    run: Run,
    disk: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        device_rates, "measure", lambda *_, tell, **__: tell(Leg("flops", 1e12)) or Rates(flops=1e12)
    )
    code, out, _ = run(disk, "--state", "split", "--device", "cpu", "--tokens", "256")
    assert code == 0
    assert f"tiering plan --measure {disk}" in " ".join(out.split())
    sizes = [
        "--params",
        "60M",
        "--device-budget",
        "100MiB",
        "--host-budget",
        "300MiB",
        "--nvme-budget",
        "2GiB",
    ]
    arguments = ["plan", *sizes, "--measure", str(disk), "--json"]
    assert tiering.cli.main([*arguments, "--state", "split", "--tokens", "256"]) == 0
    captured = capsys.readouterr()
    assert "measuring" not in captured.err and "reused measurements: CPU of" in captured.err
    rates = json.loads(captured.out)["rates"]
    assert sorted(rates) == sorted([*NVME, *CPU, "flops"])
    assert "measuring: disks" in run(disk, "--no-save")[2]  # whatever is known, and not kept
    assert tiering.cli.main([*arguments, "--tokens", "256"]) == 0  # another state format
    captured = capsys.readouterr()
    assert captured.err.splitlines()[0] == "measuring: CPU"
    assert json.loads(captured.out)["rates"]["nvme_read"] == rates["nvme_read"]


def test_the_formats_and_the_load_are_those_asked_for(
    run: Run, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: dict[str, Any] = {}

    def cpu(*, tell: Tell, **options: Any) -> Rates:
        calls.update(options)
        return Rates()

    def disks(directories: list[Path], *, tell: Tell, **options: Any) -> Rates:
        calls.update(options, directories=list(directories))
        return Rates()

    monkeypatch.setattr(measure, "cpu_rates", cpu)
    monkeypatch.setattr(measure, "disk_rates", disks)
    other = tmp_path / "other"
    other.mkdir()
    step = ["--state=bf16", "--moments=1", "--grads=fp32"]
    load = ["--bs=512K", "--iodepth=4", "--ioengine=psync", "--fixedbufs=0"]
    code, out, _ = run(disk, other, *step, *load, "--size", "10M", "--runtime", "40ms")
    assert code == 0
    io = calls.pop("io")
    assert (io.engine, io.block_size, io.queue_depth, io.registered) == ("threads", 512 << 10, 4, False)
    assert calls == {
        "state_format": "bf16",
        "state_tensors": 1,
        "grad_itemsize": 4,
        "seconds": 0.04,
        "directories": [disk, other],
        "nbytes": 10 * MIB,
        "max_bytes": None,
    }
    assert "bf16 state with 1 moment, gradients in fp32" in out
    run(disk, other)
    assert calls["nbytes"] == measure.FILE_BYTES
    for less in (["--size", "1M"], ["--runtime", "10ms"]):
        before = saved(tmp_path)
        assert "not saved for `tiering plan`" in " ".join(run(disk, *less)[1].split())
        assert saved(tmp_path) == before


def test_no_more_is_written_than_may_be(
    run: Run, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = measure._SlotCycle.run

    def endless(window: measure._SlotCycle, way: measure.Way, **options: Any) -> float:
        if window.room is not None and way != "read":
            options["seconds"] = 600.0
        return real(window, way, **options)

    monkeypatch.setattr(measure._SlotCycle, "run", endless)
    code, out, err = run(disk, "--max-write", "9M", "--json")
    assert code == 0 and err.startswith("tierbench tiers: writes at most 9.00 MiB (9437184 bytes)\n")
    report = json.loads(out)
    slot = 4 * MIB // 6 // 4096 * 4096
    # Once all, 6 slots of the 13 that 9 MiB have room for, and until half of the others, and all of them, are written.
    assert report["written_bytes"] == (6 + 3 + 4) * slot
    assert [leg["name"] for leg in report["legs"]] == NVME + CPU
    assert "NVMe write and NVMe mixed: ended early, at --max-write 9.00 MiB" in report["notes"]
    assert report["settings"]["max_write"] == 9 * MIB
    assert not report["saved"] and saved(tmp_path) == []
    code, _, err = run(disk, "--max-write", "40K")
    assert code == 2 and "give at least 48.00 KiB" in err


def test_a_gpu_has_legs_of_its_own(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, object]] = []

    def of_this_machine(**options: object) -> Measurement | None:
        calls.append(options)
        return on_device("a GPU", GPU_LEGS)

    monkeypatch.setattr(device_rates, "of_this_machine", of_this_machine)
    monkeypatch.setattr(tiers, "DRIVERS", (tmp_path,))
    code, out, _ = run("--dtype", "fp16", "--tokens", "99")
    assert (code, calls) == (0, [{"on_gpu": True, "compute_dtype": "fp16", "tokens": 99, "seconds": None}])
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = {line[:13].strip(): line.split() for line in lines}
    assert rows["host to GPU"][3:5] == ["50.0", "46.6"]
    assert rows["GPU to host"][3:5] == ["40.0", "37.3"]
    assert rows["both ways"][2:4] == ["80.0", "74.5"]
    assert rows["GPU memory"][2:4] == ["3,000", "2,790"]
    assert rows["compute"][1:3] == ["400", "TFLOP/s"]
    assert "NVMe read" not in rows and "CPU optimizer" in rows
    assert saved(tmp_path) == ["cpu", "device"]
    assert run("--device", "none")[0] == 0 and len(calls) == 1
    assert run("--device", "cpu")[0] == 0 and calls[-1]["on_gpu"] is False


def test_where_there_is_no_torch_or_no_gpu_that_is_said(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "DRIVERS", (tmp_path,))
    monkeypatch.setenv("TIERING_DEVICE", "cpu")
    assert "Note: no GPU: torch finds no usable GPU." in run()[1]

    def missing(name: str) -> object:
        raise ImportError("No module named 'torch'")

    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.setitem(cli.COMMANDS, "tiers", "")
    parser = tiers.argparse.ArgumentParser()
    tiers.add_arguments(parser)
    outcome = tiers._TiersOutcome(notes=[])
    tiers._measure(parser.parse_args([]), [], outcome)
    assert any("torch cannot be loaded (No module named 'torch')" in note for note in outcome.notes)
    assert [leg.name for leg, _ in outcome.legs] == ["optimizer", "gradients", "host_copy", "checksum"]


def test_after_ctrl_c_what_there_is_is_told_and_nothing_is_saved(
    run: Run, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = measure._SlotCycle.run
    numbers = iter((signal.SIGINT, signal.SIGTERM))

    def interrupted(window: measure._SlotCycle, way: measure.Way, **options: Any) -> float:
        if way == "read":
            signal.raise_signal(next(numbers))
        return real(window, way, **options)

    monkeypatch.setattr(measure._SlotCycle, "run", interrupted)
    code, out, _ = run(disk, "--json")
    assert code == 130
    report = json.loads(out)
    assert report["interrupted"] and not report["saved"]
    assert [leg["name"] for leg in report["legs"]] == ["nvme_write", *CPU]
    assert report["written_bytes"] > 4 * MIB
    assert list(disk.iterdir()) == [] and saved(tmp_path) == []
    code, out, _ = run(disk)
    assert code == 130
    assert "Interrupted" in out and "NVMe write" in out and "Saved" not in out
    assert "Written to the drives, at least: " in out


def test_what_is_unsafe_or_wrong_is_refused_before_anything_is_measured(
    run: Run, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, code, words in (
        ([Path("/dev/null")], 3, "is a device"),
        ([tmp_path / "nowhere"], 2, "cannot be reached"),
        ([disk, disk], 2, "named twice"),
        ([disk, "--bs", "1000"], 2, "--bs is 1000: Input should be a multiple of 4096"),
        ([disk, "--iodepth", "9999"], 2, "--iodepth is 9999"),
        ([disk, "--size", "9P"], 3, "give a smaller --size"),
    ):
        status, out, err = run(*arguments)
        assert (status, out) == (code, ""), err
        assert words in err and "measuring" not in err
    lock_fd = os.open(disk, os.O_RDONLY)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        status, _, err = run(disk)
        assert status == 3 and "another tierbench is running" in err
    finally:
        os.close(lock_fd)
    monkeypatch.setattr(swap_file, "_takes_direct_transfers", lambda *_: False)
    status, _, err = run(disk)
    assert status == 3 and "refuses O_DIRECT" in err


def test_the_name_of_a_directory_moves_no_cursor(run: Run, tmp_path: Path) -> None:
    odd = tmp_path / "[b]\x1b[2J"
    odd.mkdir()
    out = run(odd, "--no-save")[1]
    assert "\x1b" not in out and "/[b]\\x1b[2J: " in out.replace("\n", "")
    assert json.loads(run(odd, "--json")[1])["targets"][0]["directory"] == str(odd)


def test_what_the_engine_warns_of_is_a_note(run: Run, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a directory would be\n")
    report = json.loads(run("--json")[1])
    assert report["saved"] is False
    assert [note for note in report["notes"] if "the rates could not be saved in" in note]


def test_without_a_gpu_torch_is_not_loaded(tmp_path: Path) -> None:
    code = (
        "import sys; from tiering.planning import measure; from tiering.tierbench import cli, tiers;"
        " measure.MOST_KERNEL_BYTES = 1 << 20; measure.SECONDS = 0.001; tiers.DRIVERS = ();"
        " assert cli.main(['tiers', '--json']) == 0;"
        " sys.exit(int('torch' in sys.modules))"
    )
    environ = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [leg["name"] for leg in json.loads(done.stdout)["legs"]] == CPU
    code = (
        "import sys; from tiering.tierbench import cli\n"
        "try: cli.main(['tiers', '--help'])\n"
        "except SystemExit: sys.exit(int(bool({'torch', 'pydantic', 'rich', 'numpy'} & sys.modules.keys())))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--state" in done.stdout
