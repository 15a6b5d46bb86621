"""Reading stored tensors: any range, whatever came before it, and each byte of the disk once."""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import logging
import os
import random
import resource
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tiering.config.training import IoConfig
from tiering.errors import EngineStateError, WeightsError
from tiering.storage.aio import AioContext, Fault, FaultPlan
from tiering.storage.arena import PAGE
from tiering.weights import reader as weight_reader
from tiering.weights.files import StoredTensor, WeightFiles, open_weights
from tiering.weights.reader import Request, WeightReader

SHAPES = {
    "a": ("U8", 70_001),
    "b": ("BF16", 3),
    "c": ("F32", 50_000),
    "none": ("F32", 0),
    "d": ("F64", 9_000),
}
ITEMSIZES = {"U8": 1, "BF16": 2, "F32": 4, "F64": 8}
WINDOW = 4 * PAGE
BLOCKS = 5  # of a page, in a window that begins in the middle of one


def write(path: Path, shapes: dict[str, tuple[str, int]], seed: int = 0) -> Path:
    """A file whose tensors begin where they happen to, aligned or not."""
    header, end = {}, 0
    for name, (dtype, numel) in shapes.items():
        begin, end = end, end + numel * ITEMSIZES[dtype]
        header[name] = {"dtype": dtype, "shape": [numel], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + random.Random(seed).randbytes(end))
    return path


@pytest.fixture
def files(tmp_path: Path) -> WeightFiles:
    return open_weights(write(tmp_path / "model.safetensors", SHAPES))


@pytest.fixture
def reader_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., WeightReader]]:
    """Opens readers with small windows and, perhaps, faults."""
    monkeypatch.setattr(weight_reader, "WINDOW_BYTES", WINDOW)
    opened: list[WeightReader] = []

    def open_reader(
        files: WeightFiles,
        *faults: Fault,
        engine: str = "threads",
        block_size: int = PAGE,
        order: Iterable[Request] = (),
    ) -> WeightReader:
        faulty = functools.partial(AioContext, fault=FaultPlan(faults))
        monkeypatch.setattr(weight_reader, "AioContext", faulty if faults else AioContext)
        opened.append(WeightReader(files, IoConfig(engine=engine, block_size=block_size), order))
        return opened[-1]

    yield open_reader
    for reader in opened:
        reader.close()


def expected(tensor: StoredTensor, first: int, numel: int) -> bytes:
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset + first * tensor.itemsize)
        return file.read(numel * tensor.itemsize)


def bytes_read(reader: WeightReader) -> int:
    return sum(file.read.bytes for file in reader._aio.stats())


# Which bytes


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_any_range_after_any_other(
    reader_of: Callable[..., WeightReader], files: WeightFiles, engine: str, ordered: bool, seed: int
) -> None:
    rng = random.Random(seed)
    tensors = list(files.tensors.values())
    reader = reader_of(files, engine=engine, order=tensors if ordered else ())
    tensor, first = tensors[0], 0
    for _ in range(100):
        if rng.random() < 0.4:  # elsewhere, instead of further on
            tensor = rng.choice(tensors)
            first = rng.randint(0, tensor.numel)
        numel = rng.randint(0, min(tensor.numel - first, rng.choice([10, 1000, 40_000])))
        values = reader.read(tensor, first, numel)
        assert bytes(values) == expected(tensor, first, numel)
        if numel:
            assert ctypes.addressof(ctypes.c_char.from_buffer(values)) % tensor.itemsize == 0
        first += numel
        if first == tensor.numel:
            tensor, first = tensors[(tensors.index(tensor) + 1) % len(tensors)], 0


def test_what_was_asked_for_stays_until_the_next_read(
    reader_of: Callable[..., WeightReader], files: WeightFiles
) -> None:
    """The windows behind it are being filled meanwhile."""
    reader = reader_of(files, order=files.tensors.values())
    tensor = files.tensors["a"]
    for first in range(0, tensor.numel, 1000):
        numel = min(1000, tensor.numel - first)
        values = reader.read(tensor, first, numel)
        for window in list(reader._filling):
            window.wait()
        assert bytes(values) == expected(tensor, first, numel)


def test_elements_that_are_not_there(reader_of: Callable[..., WeightReader], files: WeightFiles) -> None:
    reader = reader_of(files)
    for first, numel in ((-1, 1), (0, -1), (49_999, 2), (50_001, 0)):
        with pytest.raises(ValueError, match="'c' has 50000 elements"):
            reader.read(files.tensors["c"], first, numel)
    assert bytes(reader.read(files.tensors["none"], 0, 0)) == b""
    assert bytes(reader.read(files.tensors["c"], 50_000, 0)) == b""


# How much is read, and into what


def pages(tensor: StoredTensor) -> int:
    """Bytes of the pages that a window may begin in before its range."""
    return PAGE * -(-tensor.nbytes // WINDOW)


@pytest.mark.parametrize("step", [700, 4096, 5000])
def test_in_order_each_byte_is_read_once(
    reader_of: Callable[..., WeightReader], files: WeightFiles, step: int
) -> None:
    order = [files.tensors[name] for name in ("d", "none", "a", "c", "b")]
    reader = reader_of(files, order=order)
    for tensor in order:
        for first in range(0, tensor.numel, step):
            numel = min(step, tensor.numel - first)
            assert bytes(reader.read(tensor, first, numel)) == expected(tensor, first, numel)
    most = sum(tensor.nbytes + pages(tensor) for tensor in order)
    assert sum(tensor.nbytes for tensor in order) <= bytes_read(reader) <= most


def test_the_next_tensor_is_on_its_way_when_one_ends(
    reader_of: Callable[..., WeightReader], files: WeightFiles
) -> None:
    c, d = files.tensors["c"], files.tensors["d"]
    reader = reader_of(files, order=[c, d])
    reader.read(c, 0, 49_000)
    reader.read(c, 49_000, 1000)
    assert [(window.tensor.name, window.start) for window in reader._filling] == [
        ("c", reader._filling[0].start),
        ("d", 0),
        ("d", WINDOW),
    ]


def test_nothing_is_read_behind_a_range_that_is_all_that_is_wanted(
    reader_of: Callable[..., WeightReader], files: WeightFiles
) -> None:
    c, d = files.tensors["c"], files.tensors["d"]
    ranges = [(c, 100, 20_000), (d, 500, 4_000)]
    reader = reader_of(files, order=ranges)
    for tensor, first, end in ranges:
        for at in range(first, end, 3000):
            numel = min(3000, end - at)
            assert bytes(reader.read(tensor, at, numel)) == expected(tensor, at, numel)
            if (at + numel, tensor) == (20_000, c):
                assert [(window.tensor, window.start) for window in reader._filling][1:] == [
                    (d, 500 * 8),
                    (d, 500 * 8 + WINDOW),
                ]
    assert bytes_read(reader) <= sum((end - first) * t.itemsize + pages(t) for t, first, end in ranges)
    at = 19_000  # more than was said
    assert bytes(reader.read(c, at, 31_000)) == expected(c, at, 31_000)


def test_a_jump_reads_what_was_asked_for(reader_of: Callable[..., WeightReader], files: WeightFiles) -> None:
    reader = reader_of(files)
    reader.read(files.tensors["c"], 20_000, 100)
    assert 400 <= bytes_read(reader) <= 400 + PAGE
    reader.read(files.tensors["a"], 5, 3 * WINDOW)  # longer than a window
    assert bytes_read(reader) <= 400 + PAGE + 3 * WINDOW + 4 * PAGE


def test_memory_does_not_grow_with_the_tensor(tmp_path: Path) -> None:
    size = 40 << 20
    header = json.dumps({"big": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + size)  # sparse
    files = open_weights(path)
    windows = (12 << 20) + 3 * PAGE
    with WeightReader(files, IoConfig(), files.tensors.values()) as reader:
        for step, joined in ((4 << 20, 0), (3 << 20, 3 << 20)):
            for first in range(0, size, step):
                values = reader.read(files.tensors["big"], first, min(step, size - first))
                assert not any(values[:: PAGE // 2])
            assert reader.nbytes == windows + joined


# What goes wrong


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_file_cut_short_meanwhile(
    reader_of: Callable[..., WeightReader], files: WeightFiles, engine: str
) -> None:
    c = files.tensors["c"]
    reader = reader_of(files, engine=engine)
    reader.read(c, 0, 100)
    os.truncate(c.file, c.offset + 100_000)
    with pytest.raises(WeightsError) as caught:
        reader.read(c, 30_000, 100)
    message = str(caught.value)
    assert (
        message.startswith(f"[TIER-WEIGHTS] {c.file}: reading c at byte ") and "download it again" in message
    )
    with pytest.raises(WeightsError, match="it has changed since its header was read"):
        reader.read(c, 0, 100)


def test_a_file_written_meanwhile(reader_of: Callable[..., WeightReader], files: WeightFiles) -> None:
    c = files.tensors["c"]
    reader = reader_of(files)
    reader.read(c, 0, 100)
    status = c.file.stat()
    os.utime(c.file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(
        WeightsError, match="changed since its header was read; load it when no process writes to it"
    ):
        reader.read(c, 100, 100)


def test_a_file_replaced_or_gone_before_it_is_opened(
    reader_of: Callable[..., WeightReader], files: WeightFiles
) -> None:
    c = files.tensors["c"]
    write(c.file.with_name("new"), SHAPES, seed=1).rename(c.file)
    before = open_descriptors()
    reader = reader_of(files)
    inside = open_descriptors()
    with pytest.raises(WeightsError, match="it has changed since its header was read"):
        reader.read(c, 0, 1)
    c.file.unlink()
    with pytest.raises(WeightsError, match="it does not exist"):
        reader.read(c, 0, 1)
    assert open_descriptors() == inside
    reader.close()
    assert open_descriptors() == before


def test_an_error_of_the_disk_names_everything_and_can_pass(
    reader_of: Callable[..., WeightReader], files: WeightFiles, engine: str
) -> None:
    c = files.tensors["c"]
    reader = reader_of(files, Fault("read", error=errno.ENXIO), engine=engine)
    with pytest.raises(WeightsError) as caught:
        reader.read(c, 0, 100)
    page = c.offset // PAGE * PAGE
    assert str(caught.value) == (
        f"[TIER-WEIGHTS] {c.file}: reading c at byte {page} failed: ENXIO (No such device or address); see dmesg"
    )
    assert bytes(reader.read(c, 0, 100)) == expected(c, 0, 100)


def test_an_error_ahead_is_raised_when_it_is_reached_and_not_before(
    reader_of: Callable[..., WeightReader], files: WeightFiles
) -> None:
    c = files.tensors["c"]
    reader = reader_of(files, Fault("read", first=BLOCKS + 1, error=errno.ENXIO), order=[c])
    numel = WINDOW // 4
    assert bytes(reader.read(c, 0, numel)) == expected(c, 0, numel)
    with pytest.raises(WeightsError, match="ENXIO"):
        reader.read(c, numel, numel)
    assert bytes(reader.read(c, numel, numel)) == expected(c, numel, numel)


def test_an_error_ahead_that_nobody_reaches(
    reader_of: Callable[..., WeightReader], files: WeightFiles
) -> None:
    c, d = files.tensors["c"], files.tensors["d"]
    reader = reader_of(files, Fault("read", first=BLOCKS + 1, count=0, error=errno.EIO), order=[d, c])
    reader.read(d, 0, 10)
    reader.close()
    reader.close()
    with pytest.raises(EngineStateError, match="closed"):
        reader.read(c, 0, 1)


def test_short_transfers_are_continued(
    reader_of: Callable[..., WeightReader], files: WeightFiles, engine: str
) -> None:
    c = files.tensors["c"]
    short = Fault("read", count=0, short=PAGE)
    reader = reader_of(files, short, engine=engine, block_size=3 * PAGE, order=[c])
    for first in range(0, c.numel, 10_000):
        assert bytes(reader.read(c, first, 10_000)) == expected(c, first, 10_000)


def test_files_are_closed(reader_of: Callable[..., WeightReader], tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / f"{name}.safetensors", {name: ("U8", 100)})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: f"{name}.safetensors" for name in ("one", "two")}}))
    files = open_weights(index)
    before = open_descriptors()
    reader = reader_of(files)
    for tensor in files.tensors.values():
        assert bytes(reader.read(tensor, 0, 100)) == expected(tensor, 0, 100)
    reader.close()
    assert open_descriptors() == before


@pytest.mark.parametrize("refused", ["open", "preadv"])
def test_without_o_direct(
    reader_of: Callable[..., WeightReader],
    files: WeightFiles,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refused: str,
) -> None:
    real = getattr(os, refused)

    def fake(target: Any, flags: Any, *rest: Any) -> Any:
        if refused == "preadv" or flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(target, flags, *rest)

    monkeypatch.setattr(os, refused, fake)
    before = open_descriptors()
    reader = reader_of(files, order=files.tensors.values())
    with caplog.at_level(logging.WARNING):
        for tensor in files.tensors.values():
            assert bytes(reader.read(tensor, 0, tensor.numel)) == expected(tensor, 0, tensor.numel)
    path = files.path
    assert caplog.messages == [f"the file system of {path} refuses O_DIRECT: reading it fills the page cache"]
    assert [file.direct for file in reader._aio.stats()] == [False]
    reader.close()
    assert open_descriptors() == before


def test_more_shards_than_files_may_be_open(
    reader_of: Callable[..., WeightReader], files: WeightFiles
) -> None:
    reader = reader_of(files)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        with pytest.raises(WeightsError, match="Too many open files; raise the limit with ulimit -n"):
            reader.read(files.tensors["c"], 0, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert bytes(reader.read(files.tensors["c"], 0, 1)) == expected(files.tensors["c"], 0, 1)


def test_a_disk_that_fails_the_first_page(
    reader_of: Callable[..., WeightReader], files: WeightFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fails)
    reader = reader_of(files)
    before = open_descriptors()
    with pytest.raises(WeightsError, match="it cannot be opened: Input/output error"):
        reader.read(files.tensors["c"], 0, 1)
    assert open_descriptors() == before
