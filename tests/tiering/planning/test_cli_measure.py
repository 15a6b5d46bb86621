"""``tiering plan --measure``: what it measures, what of that it keeps, and when it takes what was kept before."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiering
from tiering.config.training import IoConfig
from tiering.host import machine
from tiering.host.cgroups import IoLimit
from tiering.planning import conditions, others, saved_rates
from tiering.planning.measure import Measurement, Tell
from tiering.planning.rates import Rates
from tiering.planning.saved_rates import Record, SavedRates
from zero3.observe import device_rates
from zero3.setup import plan_for

from .asking import SMALL, Model, Plan, answered, configured

FOUND = {
    "CPU": Rates(optimizer=5e8, gradients=4e9, host_copy=8e9, checksum=9e9),
    "disks": Rates(nvme_read=3e9, nvme_write=1e9, nvme_mixed=2e9),
    "device": Rates(flops=2e12),
}
EVERYTHING = {name: rate for rates in FOUND.values() for name, rate in rates.as_dict().items()}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where rates are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tiering" / "rates"


@pytest.fixture
def measured(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Receives the name of each measurement; nothing is really measured, but its conditions are real."""
    names: list[str] = []
    monkeypatch.setattr(saved_rates.Others, "share", lambda others: 0.0)  # other tests may be at work

    def instead(make: Callable[..., Measurement]) -> Callable[..., Measurement]:
        def measure_stand_in(*arguments: Any, **options: Any) -> Measurement:
            real = make(*arguments, **options)

            def run(tell: Tell) -> Rates:
                names.append(real.name)
                return FOUND[real.name]

            return replace(real, run=run)

        return measure_stand_in

    monkeypatch.setattr(plan_for.measure, "of_cpu", instead(plan_for.measure.of_cpu))
    monkeypatch.setattr(plan_for.measure, "of_disks", instead(plan_for.measure.of_disks))
    monkeypatch.setattr(device_rates, "of_device", instead(device_rates.of_device))
    return names


def test_what_was_measured_is_taken_while_it_is_what_is_asked(
    plan: Plan, measured: list[str], cache: Path, tmp_path: Path
) -> None:
    disk, other = tmp_path / "disk", tmp_path / "other"
    disk.mkdir()
    other.mkdir()

    def lines_of(*arguments: str | Path) -> tuple[list[str], str]:
        """What was measured for it, and what was said."""
        measured.clear()
        code, out, err = plan(*SMALL, "--json", "--measure", disk, *arguments)
        assert code == 0
        assert json.loads(out)["rates"] == EVERYTHING
        return list(measured), err

    everything, err = lines_of()
    assert everything == ["CPU", "disks", "device"]
    assert err.splitlines() == ["measuring: CPU", "measuring: disks", "measuring: device"]
    again, err = lines_of()
    assert again == []
    (note,) = err.splitlines()
    today = f"{datetime.now().astimezone():%Y-%m-%d}"
    assert note.startswith("reused measurements: CPU of") and note.count(today) == 3
    assert note.endswith("--measure-again repeats them")
    assert lines_of("--measure-again")[0] == everything
    assert lines_of("--state", "split")[0] == ["CPU"]
    assert lines_of("--tokens", "64")[0] == ["device"]
    assert lines_of("--micro-batches", "2")[0] == ["CPU"]  # gradients in fp32
    # Of two directories in any order, and not of one of them.
    assert lines_of("--measure", disk, other)[0] == ["disks"]
    assert lines_of("--measure", other, disk)[0] == []
    assert lines_of("--measure", other)[0] == ["disks"]
    assert lines_of()[0] == []
    assert {path.stat().st_mode & 0o777 for path in cache.iterdir()} == {0o600}
    assert cache.stat().st_mode & 0o777 == cache.parent.stat().st_mode & 0o777 == 0o700


def test_what_was_measured_beside_others_says_so_then_and_later(
    plan: Plan, measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_rates.Others, "share", lambda others: 0.43)
    err = plan(*SMALL, "--measure", tmp_path)[2]
    assert "disks: measured while other processes used 43% of the CPUs" in err.splitlines()
    monkeypatch.setattr(saved_rates.Others, "share", lambda others: 0.0)
    (note,) = plan(*SMALL, "--measure", tmp_path)[2].splitlines()
    assert note.count("(while other processes used 43% of the CPUs)") == 3
    later = SimpleNamespace(
        now=lambda zone: datetime.now(zone) + timedelta(minutes=61), fromisoformat=datetime.fromisoformat
    )
    with monkeypatch.context() as patch:
        patch.setattr(saved_rates, "datetime", later)
        err = plan(*SMALL, "--measure", tmp_path)[2]
    assert err.splitlines() == ["measuring: CPU", "measuring: disks", "measuring: device"]
    assert "others" not in plan(*SMALL, "--measure", tmp_path, "--measure-again")[2]


def test_others_are_told_by_what_cpus_did_for_nobody_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = tmp_path / "stat"
    ours = 0.0
    monkeypatch.setattr(others.os, "sched_getaffinity", lambda _: {0, 2})
    monkeypatch.setattr(others.os, "sysconf", lambda _: 100)
    monkeypatch.setattr(others.os, "times", lambda: SimpleNamespace(user=ours, system=ours / 2))

    def counted(busy: int, idle: int, elsewhere: int, steal: int = 0) -> None:
        cpus = [f"cpu0 {busy} 0 0 {idle} 0 0 0 {steal} 0 0", f"cpu1 {elsewhere} 0 0 0 0 0 0 0 0 0"]
        stat.write_text("\n".join(["cpu  9 9 9 9 9 9 9 9 0 0", *cpus, "cpu2 0 0 0 0 0 0 0 0", "intr 1 2 3"]))

    counted(1000, 1000, 0)
    beside = others.Others(stat)
    assert beside.share() == 0.0  # no time has gone by
    ours = 2.0  # 2 s and 1 s of the system for us, of 600 ticks
    counted(1400, 1200, 900)
    assert beside.share() == pytest.approx(100 / 600)
    counted(1300, 1200, 900, steal=250)
    assert beside.share() == pytest.approx(250 / 750)
    counted(1100, 1500, 900)
    assert beside.share() == 0.0  # counted at unlike moments
    assert others.Others(tmp_path / "none").share() == 0.0


def test_rates_of_other_io_are_not_taken(plan: Plan, measured: list[str], tmp_path: Path) -> None:
    config = tmp_path / "ds_config.json"
    for block_size in ("1MiB", "512KiB"):
        measured.clear()
        settings = configured(tmp_path, fits=True, io={"block_size": block_size})
        del settings["tiering"]["device_budget"], settings["tiering"]["host_budget"]
        config.write_text(json.dumps(settings))
        assert (
            plan("--params", "60M", "--config", config, "--nvme-budget", "2GiB", "--measure", tmp_path)[0]
            == 0
        )
        assert "disks" in measured


@pytest.mark.parametrize(
    "elsewhere",
    [
        ("platform.node", lambda: "another"),
        ("platform.release", lambda: "7.0"),
        ("os.sched_getaffinity", lambda _: {0}),
        ("optim_cpu.kernels.cpu_quota", lambda: 0.5),
        ("tiering.host.cgroups.io_limits", lambda: [IoLimit("io.max", "259:0", "wbps=1048576")]),
        ("tiering.planning.conditions.machine_id", lambda: "another"),
        ("tiering.planning.conditions.cpu_identity", lambda: "another"),
        ("tiering.planning.conditions.__version__", "0.0.1"),
    ],
    ids=lambda pair: pair[0],
)
def test_another_machine_with_the_same_home_measures_for_itself(
    plan: Plan,
    measured: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    elsewhere: tuple[str, object],
) -> None:
    plan(*SMALL, "--measure", tmp_path)
    measured.clear()
    monkeypatch.setattr(*elsewhere)
    plan(*SMALL, "--measure", tmp_path)
    assert measured == ["CPU", "disks", "device"]


@pytest.mark.parametrize(("days", "reused"), [(6.9, True), (7.1, False), (-0.1, False)])
def test_what_is_a_week_old_is_measured_again(
    plan: Plan, measured: list[str], cache: Path, tmp_path: Path, days: float, reused: bool
) -> None:
    plan(*SMALL, "--measure", tmp_path)
    measured.clear()
    for path in cache.iterdir():
        rates = json.loads(path.read_text())
        rates["measured"] = (datetime.now(UTC) - timedelta(days=days)).isoformat()
        path.write_text(json.dumps(rates))
    plan(*SMALL, "--measure", tmp_path)
    assert measured == ([] if reused else ["CPU", "disks", "device"])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda text: text[: len(text) // 2], "not valid JSON"),
        (lambda text: text.replace("optimizer", "optimiser"), "unknown rate 'optimiser'"),
        (lambda text: text.replace("500000000.0", "-1"), "'optimizer' is -1"),
        (lambda text: text.replace("500000000.0", "1" + "0" * 400), "too large"),
        (lambda text: text.replace("+00:00", ""), "time zone"),
        (lambda text: text.replace('"measured": "2', '"measured": "x'), "isoformat"),
        (
            lambda text: text.replace('"rates": {', '"rates": [], "more": {'),
            "'others' is missing",
        ),
    ],
)
def test_a_damaged_record_is_passed_over_with_a_word(
    measured: list[str],
    cache: Path,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[str], str],
    why: str,
) -> None:
    saved = SavedRates.of_user()
    cpu = plan_for.measure.of_cpu()
    cache.parents[1].mkdir()
    path = saved.save(cpu, Record(FOUND["CPU"], datetime.now(UTC), 0.25))
    assert path is not None and path.parent == cache
    before = saved.find(cpu)
    assert before is not None and (before.rates, before.others) == (FOUND["CPU"], 0.25)
    path.write_text(change(path.read_text()))
    assert saved.find(cpu) is None and saved.find(cpu) is None
    (warning,) = caplog.messages
    assert str(path) in warning and why in warning and warning.endswith("each command measures them again")


def test_a_record_that_another_user_has_put_there_is_not_taken(
    measured: list[str], cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = SavedRates.of_user()
    cpu = plan_for.measure.of_cpu()
    cache.parents[1].mkdir()
    assert saved.save(cpu, Record(FOUND["CPU"], datetime.now(UTC)))
    own = os.geteuid()
    monkeypatch.setattr(saved_rates.os, "geteuid", lambda: own + 1)
    assert saved.find(cpu) is None
    assert "it belongs to another user" in caplog.text


def test_a_record_of_something_else_under_the_same_name_is_not_taken(
    measured: list[str], cache: Path
) -> None:
    saved = SavedRates.of_user()
    cpu = plan_for.measure.of_cpu()
    cache.parents[1].mkdir()
    path = saved.save(cpu, Record(FOUND["CPU"], datetime.now(UTC), 0.25))
    assert path is not None
    for old, new in (('"state": "fp32"', '"state": "split"'), ('"schema": 2', '"schema": 3')):
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        assert saved.find(cpu) is None
        path.write_text(text)
    assert saved.find(cpu) is not None


def test_a_cache_that_cannot_be_written_is_done_without(
    plan: Plan,
    measured: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Root may write everywhere: a file stands where the directory would be."""
    (tmp_path / "cache").write_text("")
    for _ in range(2):
        assert plan(*SMALL, "--measure", tmp_path)[0] == 0
        (warning,) = caplog.messages
        caplog.clear()
        assert "again" in warning
    assert measured == 2 * ["CPU", "disks", "device"]
    monkeypatch.setattr(saved_rates.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("nobody")))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert (
        saved_rates.SavedRates.of_user().save(plan_for.measure.of_cpu(), Record(Rates(), datetime.now(UTC)))
        is None
    )


def test_what_does_not_fit_is_not_measured_and_that_is_said(
    plan: Plan, measured: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "rates.json"
    code, _, err = plan(*SMALL, "--host-budget", "1MiB", "--measure", tmp_path, "--save-rates", path)
    assert code == 1
    assert "no rates were measured, because the model does not fit" in err
    assert not path.exists() and measured == []


def test_measured_rates_are_saved_and_read_back(plan: Plan, measured: list[str], tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    for _ in range(2):  # those that were just measured, and those that were known
        path.unlink(missing_ok=True)
        code, out, _ = plan(*SMALL, "--measure", tmp_path, "--save-rates", path)
        assert code == 0
        assert "Predicted step" in out
        rates = answered(plan, *SMALL, "--rates", path, "--nvme-read", "9GB/s")["rates"]
        assert rates == EVERYTHING | {"nvme_read": 9e9}
    assert measured == ["CPU", "disks", "device"]


def test_what_is_measured_is_what_the_workload_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def cpu_rates(*, tell: Tell, **arithmetic: object) -> Rates:
        calls.append(arithmetic)
        return Rates(optimizer=1.0)

    def disk_rates(directories: list[Path], *, tell: Tell, **options: object) -> Rates:
        calls.append((directories, options["io"]))
        return Rates(nvme_read=1.0)

    def of_device(
        device: torch.device, dtype: torch.dtype, *, tell: Tell, tokens: int, seconds: float
    ) -> Rates:
        calls.append((device.type, dtype, tokens))
        return Rates(flops=2.0)

    monkeypatch.setattr(plan_for.measure, "cpu_rates", cpu_rates)
    monkeypatch.setattr(plan_for.measure, "disk_rates", disk_rates)
    monkeypatch.setattr(device_rates, "measure", of_device)
    config = configured(tmp_path, fits=True, state="bf16")
    load = tiering.plan_for(model=Model(), config=config).workload
    io = IoConfig(queue_depth=3, allow_memory_file_system=True)
    rates = tiering.measure_rates(tmp_path, workload=load, tokens=32, io=io)
    assert rates == Rates(optimizer=1.0, nvme_read=1.0, flops=2.0)
    arithmetic = {"state_format": "bf16", "state_tensors": 2, "grad_itemsize": 4, "seconds": 0.5}
    assert calls == [arithmetic, ([tmp_path], io), ("cpu", torch.bfloat16, 32)]
    monkeypatch.setenv("TIERING_DEVICE", "cpu")  # planning for a GPU where there is none
    assert tiering.measure_rates(workload=load, on_gpu=True) == Rates(optimizer=1.0)


@pytest.mark.slow
def test_this_machine_is_measured(tmp_path: Path) -> None:
    load = tiering.plan_for(model=Model(), config=configured(tmp_path, fits=True)).workload
    rates = tiering.measure_rates(tmp_path, workload=load)
    assert {"nvme_read", "nvme_write", "optimizer", "checksum", "flops"} <= rates.as_dict().keys()
    assert list(tmp_path.iterdir()) == []


def test_the_machine_is_told_from_what_the_kernel_says(tmp_path: Path) -> None:
    arm = "processor\t: 0\nBogoMIPS\t: 50.00\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n\nprocessor\t: 1\nx\t: y\n"
    (tmp_path / "cpuinfo").write_text(arm)
    assert (
        machine.cpu_identity(tmp_path / "cpuinfo") == machine.cpu_model(tmp_path / "cpuinfo") == "0x41 0xd40"
    )
    assert (
        machine.cpu_identity(tmp_path / "none") == machine.cpu_model(tmp_path / "none") == os.uname().machine
    )
    assert conditions.machine_id(tmp_path / "none") == ""
    first, other = (tmp_path / name for name in ("one", "other"))
    first.write_text("0123456789abcdef\n")
    other.write_text("fedcba9876543210\n")
    identity = conditions.machine_id(first)
    assert len(identity) == 16 and identity != conditions.machine_id(other) and "0123456789" not in identity
    mine = sorted(os.sched_getaffinity(0))
    for cpu in mine:
        for index, level, size in ((0, 1, "48K"), (3, 3, "32768K")):
            cache = tmp_path / f"devices/system/cpu/cpu{cpu}/cache/index{index}"
            cache.mkdir(parents=True)
            (cache / "level").write_text(f"{level}\n")
            (cache / "size").write_text(f"{size}\n")
            (cache / "shared_cpu_list").write_text("all of them\n" if level == 3 else f"{cpu}\n")
    assert conditions.cache_bytes(tmp_path) == 32 << 20
    (tmp_path / f"devices/system/cpu/cpu{mine[0]}/cache/index3/shared_cpu_list").write_text("another part\n")
    assert conditions.cache_bytes(tmp_path) == (1 if len(mine) == 1 else 2) * (32 << 20)
    assert conditions.cache_bytes(tmp_path / "none") == 0
