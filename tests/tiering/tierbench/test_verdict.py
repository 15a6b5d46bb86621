"""What rates mean for training, and the configuration to paste: what it says is what the engine then does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiering.config import ds_config
from tiering.planning.rates import Rates
from tiering.tierbench import verdict
from tiering.tierbench.result import PathRow, Row, Settings, Sustained, Traffic

GB = 1e9
SETTINGS = Settings(
    bs=512 << 10, iodepth=24, size=1 << 30, runtime=1.0, ioengine="libaio", registered=False, verify=True
)


def row(rw: str, read: float, write: float) -> Row:
    return Row.model_validate(
        {
            "rw": rw,
            "seconds": 2.0,
            "read": Traffic(bytes=int(2 * read), ops=1),
            "write": Traffic(bytes=int(2 * write), ops=1),
            "cpu_seconds": 0.1,
            "worst_second": None,
            "paths": (PathRow(directory="/nvme", read=Traffic(), write=Traffic()),),
        }
    )


def test_rates_are_those_of_sequential_windows() -> None:
    rows = [
        row("read", 5 * GB, 0),
        row("write", 0, 3 * GB),
        row("rw", 2 * GB, 2 * GB),
        row("randread", GB, 0),
    ]
    assert verdict.rates_of(rows) == Rates(nvme_read=5 * GB, nvme_write=3 * GB, nvme_mixed=4 * GB)
    assert verdict.rates_of(rows, rwmixread=70) == Rates(nvme_read=5 * GB, nvme_write=3 * GB)
    assert verdict.rates_of(rows[3:]) == Rates()
    nothing = Sustained(burst=0, sustained=0, cached_bytes=None, written_bytes=0)
    assert verdict.rates_of(rows, nothing) == Rates(nvme_read=5 * GB)


def test_what_a_drive_sustains_counts_for_its_writes() -> None:
    rows = [row("read", 5 * GB, 0), row("write", 0, 3 * GB), row("rw", 2 * GB, 2 * GB)]
    slow = Sustained(burst=3 * GB, sustained=GB, cached_bytes=10**9, written_bytes=10**10)
    assert verdict.rates_of(rows, slow) == Rates(nvme_read=5 * GB, nvme_write=GB, nvme_mixed=2 * GB)


@pytest.mark.parametrize(("state", "read", "written"), [("fp32", 12, 14), ("split", 12, 12), ("bf16", 8, 10)])
def test_a_step_moves_what_its_format_needs(state: str, read: int, written: int) -> None:
    """Per parameter: fp32 master and moments in and out, the 16-bit parameter out; a split master needs it read."""
    answer = verdict.verdict(7_000_000_000, Rates(nvme_read=4 * GB, nvme_write=2 * GB), state=state)
    assert answer is not None
    assert answer.params == pytest.approx(7e9, rel=0.05)
    assert answer.read_bytes / answer.params == pytest.approx(read, rel=0.01)
    assert answer.write_bytes / answer.params == pytest.approx(written, rel=0.01)
    assert answer.seconds == pytest.approx(answer.read_bytes / (4 * GB) + answer.write_bytes / (2 * GB))
    assert answer.bound == "writes"
    assert answer.state == state
    fetches = 2 * 2 * answer.params / (4 * GB)  # 16-bit parameters, forward and backward
    assert answer.written_per_day == pytest.approx(
        answer.write_bytes * 86400 / (answer.seconds + fetches), rel=0.01
    )


@pytest.mark.parametrize(("read", "write", "bound"), [(1, 4, "reads"), (4, 1, "writes"), (12, 14, "both")])
def test_what_bounds_a_step(read: float, write: float, bound: str) -> None:
    answer = verdict.verdict(10**9, Rates(nvme_read=read * GB, nvme_write=write * GB))
    assert answer is not None
    assert answer.bound == bound


def test_reads_and_writes_at_once_are_as_fast_as_the_mixed_window() -> None:
    apart = verdict.verdict(10**9, Rates(nvme_read=4 * GB, nvme_write=4 * GB))
    mixed = verdict.verdict(10**9, Rates(nvme_read=4 * GB, nvme_write=4 * GB, nvme_mixed=8 * GB))
    assert apart is not None
    assert mixed is not None
    assert mixed.seconds < 0.6 * apart.seconds


def test_there_is_no_verdict_without_both_directions() -> None:
    assert verdict.verdict(10**9, Rates(nvme_read=GB)) is None


@pytest.mark.parametrize("paths", [("/nvme0",), ("/nvme0", "/nvme1")])
def test_the_configuration_says_what_was_measured(paths: tuple[str, ...]) -> None:
    block = verdict.config_block([Path(path) for path in paths], SETTINGS, state="split")
    config, _ = ds_config.load({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, **block})
    assert config.zero.stage == 3
    for section in (config.zero.offload_param, config.zero.offload_optimizer):
        assert section.device == "nvme"
        assert section.nvme_path == tuple(Path(path) for path in paths)
    io = config.tiering.io
    assert (io.engine, io.block_size, io.queue_depth, io.registered) == ("libaio", 512 << 10, 24, False)
    assert config.tiering.verify is True
    assert config.tiering.state == "split"


@pytest.mark.parametrize("bs", [4096, 12288, 1 << 20, 3 << 19, 1 << 30])
def test_every_block_size_survives_the_configuration(bs: int) -> None:
    io = verdict.io_block(SETTINGS.model_copy(update={"bs": bs}))
    config, _ = ds_config.load({"train_micro_batch_size_per_gpu": 1, "tiering": {"io": io}})
    assert config.tiering.io.block_size == bs
