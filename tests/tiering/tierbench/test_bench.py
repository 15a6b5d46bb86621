"""A run: its phases, its result as JSON, what it refuses, what it notes, and a configuration that trains."""

from __future__ import annotations

import dataclasses
import errno
import json
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import tiering
from tiering.errors import ConfigError, UnsafeTargetError
from tiering.host import drives
from tiering.host.drives import Backing, Drive, FileSystem, Link
from tiering.storage.aio import AioContext, Fault, FaultPlan
from tiering.tierbench import bench
from tiering.tierbench.bench import BenchRequest
from tiering.tierbench.load import windows as load
from tiering.tierbench.load.windows import Load
from tiering.tierbench.result import Result, Row, Sample

MIB = 1 << 20


def request(*directories: Path, **others: object) -> BenchRequest:
    usual = {"runtime": 0.05, "size": 8 * MIB, "bs": 64 << 10, "iodepth": 4}
    return BenchRequest(directories, **(usual | others))


class Told:
    """Phases, as they were announced."""

    def __init__(self, interrupt: str = "") -> None:
        self.phases: list[tuple[str, float | None]] = []
        self.announced: list[str] = []
        self._interrupt = interrupt

    def announce(self, text: str) -> None:
        self.announced.append(text)

    def phase(self, name: str, seconds: float | None) -> Callable[[Sample, float], None]:
        self.phases.append((name, seconds))

        def watch(sample: Sample, share: float) -> None:
            if name == self._interrupt:
                signal.raise_signal(signal.SIGINT)

        return watch


def test_a_run_tells_what_was_asked_what_was_used_and_what_it_means(tmp_path: Path) -> None:
    watcher = Told()
    result = bench.run(request(tmp_path, verify=True, params=10**9, command="tierbench x"), watcher)
    assert [name for name, _ in watcher.phases] == ["writing once", "read", "write", "mixed", "verifying"]
    assert [row.rw for row in result.rows] == ["read", "write", "rw"]
    assert not result.interrupted
    assert result.command == "tierbench x"
    assert result.engine.ioengine in ("io_uring", "libaio", "threads")
    assert (result.settings.bs, result.settings.size, result.settings.ioengine) == (64 << 10, 8 * MIB, "auto")
    assert result.written_bytes == 8 * MIB + sum(row.write.bytes for row in result.rows)
    assert result.read_bytes == 8 * MIB + sum(row.read.bytes for row in result.rows)
    assert result.verified_bytes == result.read_bytes
    (target,) = result.targets
    assert target.directory == str(tmp_path)
    assert target.backing == drives.behind(tmp_path)
    assert target.free_bytes > 0
    assert result.verdict is not None
    assert result.verdict.params == pytest.approx(1e9, rel=0.05)
    assert list(tmp_path.iterdir()) == []


def test_a_result_survives_json(tmp_path: Path) -> None:
    result = bench.run(request(tmp_path, rws=("read", "randrw")))
    (tmp_path / "a.json").write_text(result.to_json())
    assert Result.load(tmp_path / "a.json") == result
    data = json.loads(result.to_json())
    assert (data["schema_version"], data["kind"]) == (1, "bench")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not valid JSON"),
        ("[]", r"is not a result of `tierbench DIR --json` \(its kind is None\)"),
        ('{"kind": "tune", "schema_version": 1}', r"\(its kind is 'tune'\)"),
        (
            '{"kind": "bench", "schema_version": 99}',
            "has schema version 99, but this tierbench reads version 1; measure again",
        ),
        ('{"kind": "bench", "schema_version": 1}', "is not a valid result: version: Field required"),
    ],
)
def test_what_is_no_result(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ConfigError, match=words):
        Result.load(tmp_path / "a.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        Result.load(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("others", "words"),
    [
        (
            {"bs": 10**6},
            r"--bs is 1000000 bytes, which is not a multiple of 4096 up to 1 GiB; use for example 999424",
        ),
        ({"bs": 2 << 30}, "up to 1 GiB"),
        ({"iodepth": 0}, r"--iodepth is 0; choose 1 \.\. 512"),
        ({"iodepth": 513}, "--iodepth is 513"),
        ({"numjobs": 0}, "--numjobs is 0"),
        ({"rwmixread": 100}, "--rwmixread is 100"),
        ({"runtime": 0.0}, "--runtime is 0"),
        ({"verify": True, "direct": False}, "--verify cannot test the drive through the page cache"),
        ({"sustained": True, "direct": False}, "--sustained cannot test the drive through the page cache"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, others: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        request(tmp_path, **others)


def test_more_memory_than_there_is_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "host_memory", lambda: (3 << 30, 1 << 30))
    usual = request(
        tmp_path, size=None, bs=16 * MIB, iodepth=20, rws=("read",), runtime=0.01, max_write=700 * MIB
    )
    assert bench.run(usual).rows
    with pytest.raises(
        ConfigError,
        match=r"3 jobs and 1 directory need \d\.\d\d GiB of memory, which is more than half of the free 2\.00 GiB",
    ):
        bench.run(dataclasses.replace(usual, numjobs=3))


def test_what_poses_as_a_disk_has_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    below = Drive("vda", transport="virtio")
    loop = Drive("dm-0", layer="crypt", members=(Drive("loop0", layer="loop", members=(below,)),))
    real = drives.behind(tmp_path)
    monkeypatch.setattr(drives, "behind", lambda *_: dataclasses.replace(real, drives=(loop,)))
    result = bench.run(request(tmp_path, rws=("read", "write")))
    assert result.rows and (result.verdict, result.config) == (None, {})
    assert (
        f"{tmp_path}: loop0 is a file that appears as a disk: the figures are those of memory and"
        in "".join(result.notes)
    )
    assert "no verdict for training" in result.notes[-1]


def test_buffered_figures_have_no_verdict(tmp_path: Path) -> None:
    result = bench.run(request(tmp_path, direct=False, rws=("read", "write")))
    assert (result.verdict, result.config) == (None, {})
    assert any("buffered figures include the page cache" in note for note in result.notes)


@pytest.mark.parametrize(
    ("phase", "rows"), [("writing once", []), ("read", ["read"]), ("mixed", ["read", "write", "rw"])]
)
def test_ctrl_c_ends_a_run_with_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, rows: list[str]
) -> None:
    monkeypatch.setattr(load, "SAMPLE_SECONDS", 0.001)
    watcher = Told(interrupt=phase)
    result = bench.run(request(tmp_path, size=64 * MIB), watcher)
    assert result.interrupted
    assert [row.rw for row in result.rows] == rows
    assert watcher.phases[-1][0] == phase
    assert all(row.complete for row in result.rows[:-1])
    assert rows or not any("too few" in note for note in result.notes)
    assert Result.model_validate_json(result.to_json()) == result


def test_without_a_size_two_seconds_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "PREPARATION_SECONDS", 0.02)
    watcher = Told()
    result = bench.run(request(tmp_path, size=None, rws=("read",)), watcher)
    assert watcher.phases[0] == ("writing once", 0.02)
    assert 0 < result.settings.size < 1 << 30


def test_max_write_covers_the_preparation_too(tmp_path: Path) -> None:
    result = bench.run(request(tmp_path, size=None, max_write=20 * MIB, runtime=5.0, rws=("write", "rw")))
    assert result.settings.size == 10 * MIB
    assert result.written_bytes <= 20 * MIB
    assert [row.rw for row in result.rows] == ["write", "rw"]
    assert [note.split(" after ")[0] for note in result.notes[:2]] == ["write: ended", "mixed: ended"]
    written = [row.write.bytes for row in result.rows]
    assert max(written) - min(written) <= 4 * MIB  # a part each
    with pytest.raises(ConfigError, match=r"--max-write 256\.00 KiB is too little"):
        bench.run(request(tmp_path, max_write=256 << 10))


def test_past_the_write_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "INTERVAL_SECONDS", 0.05)
    watcher = Told()
    result = bench.run(
        request(tmp_path, size=None, sustained=True, max_write=40 * MIB, runtime=20.0, rws=("read",)), watcher
    )
    assert [name for name, _ in watcher.phases] == ["sustained write", "read"]
    (announced,) = watcher.announced
    assert announced == (
        "writes at most 36.00 MiB (37748736 bytes) in at most 20 s, and stops earlier if the rate has fallen and"
        " is steady; --max-write and --runtime change these limits"
    )
    assert [row.rw for row in result.rows] == ["write", "read"]
    assert result.sustained is not None
    assert result.sustained.written_bytes == result.rows[0].write.bytes == 36 * MIB
    assert result.written_bytes <= 40 * MIB
    assert result.settings.runtime == bench.INTERVAL_SECONDS
    assert result.verdict is not None
    reading = result.verdict.read_bytes / result.rows[1].rate
    writing = result.verdict.write_bytes / result.sustained.sustained
    assert result.verdict.seconds == pytest.approx(reading + writing)


def test_a_bad_transfer_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = FaultPlan((Fault("read", first=5, error=errno.ENXIO),))
    monkeypatch.setattr(load, "AioContext", partial(AioContext, fault=failing))
    result = bench.run(request(tmp_path, rws=("write", "read", "rw"), verify=True))
    assert result.failure is not None and result.verified_bytes is None
    assert "ENXIO (No such device or address)" in result.failure
    assert [row.rw for row in result.rows] == ["write"]
    assert result.read_bytes >= 4 * (64 << 10)
    assert result.targets[0].others_read is None
    assert Result.model_validate_json(result.to_json()) == result


def test_a_mix_that_is_not_even_tells_no_step_of_both_at_once(tmp_path: Path) -> None:
    result = bench.run(request(tmp_path, rwmixread=90))
    rates = {row.rw: row.rate for row in result.rows}
    verdict = result.verdict
    assert verdict is not None
    assert verdict.seconds == pytest.approx(
        verdict.read_bytes / rates["read"] + verdict.write_bytes / rates["write"]
    )
    assert "--rwmixread is not 50" in result.notes[-1]


def test_a_full_disk_is_told_before_anything_is_written(small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(32 * MIB)
    (disk / "other").write_bytes(bytes(20 * MIB))
    with pytest.raises(UnsafeTargetError, match="would leave less than a tenth of the free space"):
        bench.run(request(disk, size=16 * MIB))
    result = bench.run(request(disk, size=None))
    assert 0 < result.settings.size < 2 * MIB
    assert {path.name for path in disk.iterdir()} <= {"other", "lost+found"}


def behind(kind: str, *drives: Drive) -> Backing:
    type_ = {"network": "nfs4", "overlay": "overlay"}.get(kind, "ext4")
    return Backing(FileSystem(type_, kind, "source", "/mnt", ("rw",)), drives)


@pytest.mark.parametrize(
    ("backing", "words"),
    [
        (behind("network"), "nfs4 is a network file system"),
        (behind("overlay"), "an overlay"),
        (behind("disk", Drive("sda", rotational=True, transport="sata")), "sda is a hard disk"),
        (
            behind(
                "disk",
                Drive("nvme0n1", link=Link("PCIe 3.0 x4", 3.9e9), best_link=Link("PCIe 4.0 x4", 7.9e9)),
            ),
            "nvme0n1 is connected by PCIe 3.0 x4, 3.9 GB/s, but supports PCIe 4.0 x4",
        ),
        (behind("disk", Drive("nvme0n1", rotational=False)), None),
    ],
)
def test_what_lowers_the_worth_of_figures_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backing: Backing, words: str | None
) -> None:
    monkeypatch.setattr(drives, "behind", lambda directory: backing)
    notes = bench.run(request(tmp_path, rws=("read",))).notes
    assert [note for note in notes if note.startswith(f"{tmp_path}: ")] == (list(notes) if words else [])
    assert words is None or words in notes[0]


def test_what_others_move_on_the_drive_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = iter([(1000, 2000), (1000 + 3 * 10**9, 2000 + 10**9)])
    monkeypatch.setattr(drives, "behind", lambda directory: behind("disk", Drive("nvme0n1")))
    monkeypatch.setattr(drives, "io_counters", lambda drive: next(counted))
    result = bench.run(request(tmp_path))
    assert result.targets[0].others_read == 3 * 10**9 - result.read_bytes
    assert result.targets[0].others_written == 10**9 - result.written_bytes


def test_what_we_move_is_ours_where_directories_are_unlike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each drive has moved only what its own directory had, of which the late one had much less."""
    late = FaultPlan((Fault("any", count=0, delay=0.02, file=1),))

    def moved(drive: Drive) -> tuple[int, int]:
        return counted[drive.name]

    def close(over: Load) -> None:
        counted.update(zip(counted, over.moved(), strict=True))
        really_close(over)

    counted, really_close = {"fast": (0, 0), "late": (0, 0)}, Load.close
    monkeypatch.setattr(load, "AioContext", partial(AioContext, fault=late))
    monkeypatch.setattr(drives, "behind", lambda directory: behind("disk", Drive(directory.name)))
    monkeypatch.setattr(drives, "io_counters", moved)
    monkeypatch.setattr(Load, "close", close)
    for name in counted:
        (tmp_path / name).mkdir()
    result = bench.run(request(*(tmp_path / name for name in counted), rws=("read",)))
    # Without the ramp time, the fast directory would wait for the end of the late one.
    assert result.settings.ramp_time == bench.RAMP_SECONDS
    assert counted["fast"][0] > counted["late"][0] > 0
    assert [(each.others_read, each.others_written) for each in result.targets] == [(0, 0), (0, 0)]


def test_the_configuration_trains(tmp_path: Path) -> None:
    block = bench.run(request(tmp_path, ioengine="threads", rws=("read",))).config
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        **block,
        "tiering": {**block["tiering"], "cache_in_host": False, "nvme_budget": "64MiB"},
    }
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
    engine, *_ = tiering.initialize(model=model, config=config)
    try:
        io = engine.settings.tiering.io
        assert (io.engine, io.block_size, io.queue_depth) == ("threads", 64 << 10, 4)
        engine.backward(engine(torch.ones(1, 256)).square().mean())
        engine.step()
        assert engine.plan.nvme_traffic()[1] > 0
    finally:
        engine.close()


def test_rows_tell_rates() -> None:
    row = Row.model_validate(
        {
            "rw": "rw",
            "seconds": 2.0,
            "read": {"bytes": 4 * 10**9, "ops": 4000},
            "write": {"bytes": 2 * 10**9, "ops": 2000},
            "cpu_seconds": 0.6,
            "worst_second": 1.0,
            "paths": (),
        }
    )
    assert (row.rate, row.iops, row.cpu_per_gb) == (3e9, 3000, pytest.approx(0.1))
