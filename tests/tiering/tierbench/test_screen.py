"""What a result looks like in a terminal, in a log and in ASCII."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from tiering.config.ds_config import load
from tiering.tierbench.display import screen
from tiering.tierbench.result import Result

from . import results


def shown(result: Result, width: int = 80, encoding: str = "utf-8", *, terminal: bool = False) -> str:
    """What arrives: a character that ``encoding`` does not have would raise."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")
    screen.show(result, Console(file=stream, width=width, force_terminal=terminal))
    stream.flush()
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode(encoding)


def cells(text: str, name: str) -> list[str]:
    """The cells of the first line of a table that begins with ``name``."""
    return next(re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if line.startswith(name))


@pytest.mark.parametrize("result", results.ALL)
@pytest.mark.parametrize(
    ("width", "encoding"), [(80, "utf-8"), (120, "utf-8"), (80, "ascii"), (40, "latin-1")]
)
def test_it_fits_and_says_nothing_that_is_not_known(result: Result, width: int, encoding: str) -> None:
    text = shown(result, width, encoding)
    for line in text.splitlines():
        assert len(line) <= max(width, 80) and line == line.rstrip()
    assert "None" not in text and "\x1b" not in text and " nan" not in text
    facts, _, block = text.partition("to paste into a configuration:\n")
    assert (json.loads(block) if block else {}) == result.config
    assert not result.rows or "GB/s" in facts


@pytest.mark.parametrize(("width", "most"), [(80, 42), (120, 33)])
def test_one_drive_is_one_screen(width: int, most: int) -> None:
    assert len(shown(results.NVME, width).splitlines()) <= most


def test_the_header_says_what_was_measured_and_how() -> None:
    text = " ".join(shown(results.NVME).split())
    for part in (
        "/mnt/nvme0/swap, xfs on /dev/nvme0n1 at /mnt/nvme0, 1.21 TiB free",
        "nvme0n1, SAMSUNG MZWLO3T8HCLS-00A07, firmware OPPA1B5Q, 3841 GB, PCIe 5.0 x4, 15.8 GB/s, NUMA node 0,",
        "scheduler none",
        "io_uring, registered_buffers, registered_files, single_issuer, defer_taskrun",
        "bs 1M (1048576 bytes), iodepth 16, numjobs 1, size 4G, O_DIRECT",
        "128 CPUs",
    ):
        assert part in text
    assert "refused io_uring: Operation not permitted" in " ".join(shown(results.VIRTIO).split())
    assert "swap, overlay on overlay at /, written to ext4 on /dev/nvme0n1 at /var" in shown(
        results.BUFFERED, 120
    )
    stack = " ".join(shown(results.TWO).split())
    assert "md0, raid0 drive of md0: nvme0n1, nvme2n1, nvme4n1, each SAMSUNG" in stack


def test_rates_and_latencies_are_two_tables_or_one() -> None:
    narrow, wide = shown(results.NVME), shown(results.NVME, 120)
    assert cells(narrow, "mixed")[:6] == ["mixed", "9.92", "9.24", "9.46k", "9.32", "0.0175"]
    assert cells(narrow, "  writes") == ["writes", "4.96", "4.62", "4.73k"]
    assert cells(narrow, "mixed writes") == ["mixed writes", "3.38ms", "4.74ms", "6.43ms", "10.8ms", "26.1ms"]
    assert cells(wide, "  writes") == [*cells(narrow, "  writes"), *cells(narrow, "mixed writes")[1:]]
    assert cells(wide, "read")[4:9] == ["1.25ms", "1.75ms", "2.38ms", "4.00ms", "9.63ms"]
    assert "latency" not in wide


def test_bandwidth_over_time_is_drawn_as_the_stream_can() -> None:
    assert cells(shown(results.TWO), "sustained write")[-1].startswith("█▄▃▃▃")
    assert cells(shown(results.TWO, encoding="ascii"), "sustained write")[-1].startswith("#-::")


def test_each_directory_and_its_share() -> None:
    text = shown(results.TWO)
    assert cells(text, "GB/s by directory")[1:] == ["sustained write", "read", "write", "mixed"]
    assert cells(text, "/mnt/nvme1/swap")[1:] == ["1.16 (50%)", "10.1 (50%)", "5.90 (50%)", "8.05 (50%)"]
    assert "by directory" not in shown(results.NVME)


def test_what_it_means() -> None:
    text = " ".join(shown(results.TWO).split())
    assert "the write cache was full after 20.0 GB" in text
    assert "37.4 GB written (wear, preparation included), 46.0 GB read" in text
    assert (
        "Optimizer step of a 6.74B model with fp32 state on these paths: about 18 s, bound by writes. It reads"
        " 80.9 GB and writes 94.3 GB; steps without a pause write up to 399 TB per day."
    ) in text
    assert "8.00 GB read, all equal to the written data" in shown(results.VIRTIO)


def test_others_on_the_drive_are_told_of_if_they_matter() -> None:
    assert "other processes read 3.10 GB and wrote 12.6 MB" in " ".join(shown(results.VIRTIO).split())
    assert "others" not in shown(results.NVME)  # 94 MB beside 76 GB


def test_an_interrupted_run_says_so_first() -> None:
    text = shown(results.INTERRUPTED)
    assert text.startswith("Interrupted (write after 0.7 s): these are the measurements so far.\n")
    assert cells(text, "write")[4] == "-"  # there was no whole second


def test_a_terminal_is_sent_styles_and_nothing_that_a_name_hides() -> None:
    text = shown(results.BARE, terminal=True)
    assert "/odd [name] $^$\\x1b[2J" in text
    assert "\x1b[2J" not in text


def test_the_block_is_a_configuration() -> None:
    width = 60
    block = screen.block(results.TWO.config, width)
    assert json.loads(block) == results.TWO.config
    assert all(len(line) < width for line in block.splitlines() if "nvme_path" not in line)
    lines = screen.block(results.VIRTIO.config, 120).splitlines()
    assert lines[2:5] == [  # what is nested stands alone
        '    "stage": 3,',
        '    "offload_param": {"device": "nvme", "nvme_path": "/data"},',
        '    "offload_optimizer": {"device": "nvme", "nvme_path": "/data"}',
    ]
    training = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    config, _ = load({**training, **json.loads(block)})
    assert config.zero.swap_directories == tuple(map(Path, results.PATHS))
