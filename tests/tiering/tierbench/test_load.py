"""The load: what is counted adds up, nothing is left behind, limits are kept, wrong bytes are found."""

from __future__ import annotations

import errno
import os
import resource
import signal
import threading
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.errors import ConfigError, SwapError, SwapSpaceError, UnsafeTargetError
from tiering.storage import swap_file
from tiering.storage.aio import AioContext, Fault, FaultPlan
from tiering.storage.latencies import LatencyHistogram
from tiering.tierbench.load import block_mover
from tiering.tierbench.load import windows as load_module
from tiering.tierbench.load.block_mover import slots
from tiering.tierbench.load.windows import Load, WorkFiles, worst_second
from tiering.tierbench.result import Row, Sample, Settings
from tiering.tierbench.words import READ_WRITE, ReadWrite, reads, writes

MIB = 1 << 20
SECONDS = 0.05


def settings(**others: object) -> Settings:
    usual = {"bs": 64 << 10, "iodepth": 8, "size": 16 * MIB, "runtime": SECONDS}
    return Settings.model_validate(usual | others)


def work_files(*directories: Path, size: int = 16 * MIB, **others: object) -> WorkFiles:
    return WorkFiles(directories, size=size, **others)


@pytest.mark.parametrize("rw", READ_WRITE)
def test_what_a_window_counts_adds_up(tmp_path: Path, rw: ReadWrite) -> None:
    load_settings = settings()
    with work_files(tmp_path) as file, Load(file, load_settings) as load:
        assert load.lay_out().write.bytes == 16 * MIB == file.written_bytes
        row = load.run(rw, seconds=SECONDS)
        stats = [(each.read.bytes, each.write.bytes) for each in load._contexts[0].stats()]
        assert load._contexts[0].moved() == stats == load.moved()
    assert bool(row.read.bytes) is reads(rw)
    assert bool(row.write.bytes) is writes(rw)
    assert row.seconds >= SECONDS
    assert row.complete
    for _, traffic in row.directions():
        assert traffic.bytes == traffic.ops * load_settings.bs
        assert traffic.latency is not None
        latency = traffic.latency
        assert 0 < latency.p50 <= latency.p95 <= latency.p99 <= latency.p999 <= latency.max <= row.seconds
    assert (file.read_bytes, file.written_bytes) == (row.read.bytes, row.write.bytes + 16 * MIB)
    assert [path.directory for path in row.paths] == [str(tmp_path)]
    assert list(tmp_path.iterdir()) == []


def test_samples_tell_of_all_that_was_moved(tmp_path: Path) -> None:
    shares: list[float] = []

    def watch(sample: Sample, share: float) -> None:
        shares.append(share)

    with work_files(tmp_path) as file, Load(file, settings()) as load:
        load.lay_out()
        row = load.run("rw", seconds=0.35, watch=watch)
    ends = [sample.at for sample in row.samples]
    nbytes = sum(
        sample.rate * (sample.at - before) for sample, before in zip(row.samples, [0.0, *ends], strict=False)
    )
    assert nbytes <= row.bytes * 1.001
    assert nbytes >= row.bytes * ends[-1] / row.seconds * 0.5
    assert shares == sorted(shares)
    assert len(shares) >= 3
    assert 0.8 < shares[-1] <= 1.0


def test_a_mix_has_the_share_of_reads_that_was_asked_for(tmp_path: Path) -> None:
    load_settings = settings(rwmixread=75, bs=4096, iodepth=4)
    with work_files(tmp_path) as file, Load(file, load_settings) as load:
        load.lay_out()
        row = load.run("rw", seconds=0.2)
    _, blocks = slots(load_settings, 16 * MIB)
    ops = row.read.ops + row.write.ops
    assert abs(row.read.ops - 0.75 * ops) <= 2 * blocks  # as near as requests can come


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Bytes of each request of an AioContext, and of the memory that it uses. Slots have 256 KiB."""
    prepare, seen = AioContext.prepare_vector, []

    def noted(aio: AioContext, kind: Any, buffer: Any, pieces: Any, **more: Any) -> Any:
        seen.append((sum(piece.nbytes for piece in pieces), max(piece.at + piece.nbytes for piece in pieces)))
        return prepare(aio, kind, buffer, pieces, **more)

    monkeypatch.setattr(AioContext, "prepare_vector", noted)
    monkeypatch.setattr(block_mover, "_SLOT_BYTES", MIB // 4)
    return seen


def test_requests_are_smaller_while_the_file_is_written_and_shared_by_jobs(
    tmp_path: Path, requests: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow drive must complete some in a short time; Python's time per byte falls with the size."""
    monkeypatch.setattr(block_mover, "_FIRST_BYTES", MIB // 8)
    load_settings = settings(bs=65536, iodepth=2)
    with work_files(tmp_path) as file, Load(file, load_settings) as load:
        load.lay_out()
        assert set(requests) == {(MIB // 8, MIB // 8)}
        load.run("read", seconds=SECONDS)
        assert max(requests) == (2 * MIB, MIB // 4)
    # Of four jobs, each has a quarter in the same memory.
    assert slots(load_settings, 16 * MIB) == (3, 4)
    assert slots(settings(bs=65536, iodepth=2, numjobs=4), 16 * MIB) == (4, 1)


@pytest.mark.parametrize(
    ("mix", "most"), [({}, 2 * MIB), ({"rwmixread": 75}, MIB // 4), ({"verify": True}, MIB // 4)]
)
def test_requests_use_memory_again_except_where_that_would_show(
    tmp_path: Path, requests: list[tuple[int, int]], mix: dict[str, object], most: int
) -> None:
    with work_files(tmp_path) as file, Load(file, settings(bs=65536, iodepth=2, **mix)) as load:
        load.lay_out()
        load.run("rw", seconds=SECONDS)
    assert max(requests) == (most, MIB // 4)


def test_a_small_file_has_several_requests_in_flight(tmp_path: Path, requests: list[tuple[int, int]]) -> None:
    load_settings = settings(bs=65536, iodepth=2, size=2 * MIB)
    with work_files(tmp_path, size=2 * MIB) as file, Load(file, load_settings) as load:
        load.lay_out()
        load.run("rw", seconds=SECONDS)
    # Slots of two blocks; of the 16 blocks of each half of the file, four requests may be in flight.
    assert max(requests) == (4 * 65536, 2 * 65536)


def test_an_interval_ends_with_the_blocks_in_flight_but_not_before_the_first(
    tmp_path: Path, requests: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = block_mover.Lane._work

    def begin_late(lane: block_mover.Lane, *arguments: Any) -> None:
        time.sleep(0.1)
        work(lane, *arguments)

    late = FaultPlan((Fault("read", count=0, delay=0.2),))
    monkeypatch.setattr(load_module, "AioContext", partial(AioContext, fault=late))
    monkeypatch.setattr(block_mover.Lane, "_work", begin_late)
    with work_files(tmp_path) as file, Load(file, settings(bs=65536, iodepth=2)) as load:
        load.lay_out()
        row = load.run("read", seconds=1e-6)
    assert max(requests)[0] == 2 * MIB
    assert row.complete
    assert 0 < row.read.bytes < MIB  # the whole request takes 3.2 s


def test_several_directories_and_jobs_add_up(tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("a", "b")]
    for place in places:
        place.mkdir()
    with work_files(*places, size=4 * MIB, numjobs=2) as files, Load(files, settings(numjobs=2)) as load:
        assert load.lay_out().write.bytes == 4 * 4 * MIB
        assert files.written_once == [[4 * MIB, 4 * MIB], [4 * MIB, 4 * MIB]]
        row = load.run("rw", seconds=SECONDS)
    assert [path.directory for path in row.paths] == [str(place) for place in places]
    for way in ("read", "write"):
        assert all(getattr(path, way).ops for path in row.paths)
        for figure in ("bytes", "ops"):
            parts = [getattr(getattr(path, way), figure) for path in row.paths]
            assert sum(parts) == getattr(getattr(row, way), figure)


def one_late_drive(monkeypatch: pytest.MonkeyPatch, delay: float) -> None:
    """Let each block of the second directory begin so many seconds late."""
    late = FaultPlan((Fault("any", count=0, delay=delay, file=1),))
    monkeypatch.setattr(load_module, "AioContext", partial(AioContext, fault=late))


def test_what_is_written_together_ends_with_the_first_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_late_drive(monkeypatch, 0.1)
    places = [tmp_path / name for name in ("fast", "slow")]
    for place in places:
        place.mkdir()
    with work_files(*places) as files, Load(files, settings()) as load:
        row = load.lay_out(together=True)
        fast, slow = row.paths
        ((whole, part),) = files.written_once
        assert fast.write.bytes == whole == 16 * MIB
        assert slow.write.bytes <= part < 16 * MIB
        assert files.written_bytes == load._total_moved()[1]
    # Of the requests that were canceled, only the first can have had blocks in flight, but not all of its blocks.
    beyond, blocks = files.written_bytes - whole - part, slots(settings(), 16 * MIB)[1]
    assert beyond in range(0, blocks * settings().bs, settings().bs)


def test_a_ramp_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    latencies = AioContext.latencies

    def late(aio: AioContext, file: int, kind: Literal["read", "write"]) -> LatencyHistogram:
        time.sleep(0.005)  # transfers go on while they are counted
        return latencies(aio, file, kind)

    monkeypatch.setattr(AioContext, "latencies", late)
    with work_files(tmp_path) as file, Load(file, settings()) as load:
        load.lay_out()
        row = load.run("read", seconds=SECONDS, ramp=0.2)
    assert 0 < row.read.bytes < file.read_bytes
    assert SECONDS <= row.seconds < 0.2 + SECONDS
    assert row.read.bytes == row.read.ops * (64 << 10)


@pytest.mark.slow
def test_after_a_ramp_what_is_drained_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queues are as full at a window's end as at its begin: to count their rest at one end alone would flatter."""

    def late(**options: Any) -> AioContext:
        return AioContext(**options, fault=FaultPlan((Fault("read", count=0, rate=20 * MIB),)))

    monkeypatch.setattr(load_module, "AioContext", late)
    with work_files(tmp_path) as file, Load(file, settings(bs=MIB)) as load:
        load.lay_out()
        row = load.run("read", seconds=0.1, ramp=0.1)
        # Eight blocks are in flight at the end, each for a twentieth of a second.
        assert 0 < row.read.bytes <= file.read_bytes - 6 * MIB


def test_what_preparation_had_no_time_for_is_not_read(tmp_path: Path) -> None:
    with work_files(tmp_path, size=256 * MIB) as file, Load(file, settings(size=256 * MIB)) as load:
        for seconds in (0.001, 0.01, 0.1):  # a busy machine may not begin within the first
            load.lay_out(seconds=seconds)
            ((written,),) = file.written_once
            if written:
                break
        assert 0 < written < 256 * MIB
        assert load.check().read.bytes == written // (64 << 10) * (64 << 10)


@pytest.mark.parametrize("rw", ["write", "rw", "randwrite"])
def test_no_more_is_written_than_allowed(tmp_path: Path, rw: ReadWrite) -> None:
    with work_files(tmp_path, size=4 * MIB) as file, Load(file, settings(size=4 * MIB)) as load:
        file.max_write = 11 * MIB
        load.lay_out()
        row = load.run(rw, seconds=30.0)
        assert row.complete
        assert 4 * MIB + row.write.bytes == file.written_bytes <= 11 * MIB
        assert row.write.bytes >= 5 * MIB
        assert load.run("write", seconds=30.0).bytes <= MIB
        assert file.written_bytes <= 11 * MIB


def interrupted(load: Load, rw: ReadWrite) -> Row:
    def watch(sample: Sample, share: float) -> None:
        signal.raise_signal(signal.SIGINT)

    return load.run(rw, seconds=30.0, watch=watch)


def test_ctrl_c_leaves_what_there_is_and_all_can_go_on(tmp_path: Path) -> None:
    with work_files(tmp_path) as file, Load(file, settings()) as load:
        load.lay_out()
        row = interrupted(load, "rw")
        assert not row.complete
        assert row.seconds < 10
        assert row.bytes > 0
        assert load.run("read", seconds=SECONDS).complete


def test_ctrl_c_while_the_queue_empties_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_threads = load_module._LaneThreads.__exit__

    def leave(crew: load_module._LaneThreads, *error: object) -> None:
        signal.raise_signal(signal.SIGINT)
        end_threads(crew, *error)

    monkeypatch.setattr(load_module._LaneThreads, "__exit__", leave)
    threads = threading.active_count()
    with work_files(tmp_path) as file, Load(file, settings()) as load:
        row = load.lay_out()
        assert threading.active_count() == threads
        assert not row.complete
        assert row.write.bytes == file.written_bytes == load._total_moved()[1] > 0


def test_threads_that_cannot_start_are_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, successes = threading.Thread.start, iter([True, False])

    def limited(thread: threading.Thread) -> None:
        if not next(successes):
            raise RuntimeError("can't start new thread")
        start(thread)

    before = threading.active_count()
    with work_files(tmp_path, numjobs=2) as file, Load(file, settings(numjobs=2)) as load:
        monkeypatch.setattr(threading.Thread, "start", limited)
        with pytest.raises(ConfigError, match=r"only 1 of 2 threads.*lower --numjobs"):
            load.lay_out()
        assert threading.active_count() == before


def test_wrong_bytes_on_the_drive_are_found(tmp_path: Path) -> None:
    with work_files(tmp_path) as file, Load(file, settings(verify=True)) as load:
        load.lay_out()
        load.run("randwrite", seconds=SECONDS)
        load.run("rw", seconds=SECONDS)
        assert load.check().read.bytes == 16 * MIB
        with on_drive(file).open("r+b", buffering=0) as other:
            (byte,) = os.pread(other.fileno(), 1, 9 * MIB + 17)
            os.pwrite(other.fileno(), bytes([byte ^ 1]), 9 * MIB + 17)
            os.fsync(other.fileno())
        with pytest.raises(SwapError, match="differ from the bytes written") as caught:
            load.check()
    assert caught.value.errno == errno.EBADMSG
    assert caught.value.offset == 9 * MIB


def on_drive(file: WorkFiles) -> Path:
    """The one file of ``file``, to be opened without O_DIRECT."""
    return Path(f"/proc/self/fd/{file.files[0][0].fd}")


def pages(file: WorkFiles) -> list[bytes]:
    data = on_drive(file).read_bytes()
    return [data[at : at + 4096] for at in range(0, len(data), 4096)]


@pytest.mark.parametrize("rw", ["rw", "randrw", "randwrite"])
@pytest.mark.parametrize("size", [1 * MIB, 16 * MIB])
def test_right_bytes_are_not_called_wrong(tmp_path: Path, rw: ReadWrite, size: int) -> None:
    """No block is read, or written again, while a write to it is under way."""
    load_settings = settings(size=size, verify=True, bs=4096, rwmixread=70, iodepth=32)
    with work_files(tmp_path, size=size) as file, Load(file, load_settings) as load:
        load.lay_out()
        assert load.run(rw, seconds=0.15).bytes > 0
        assert load.check().read.bytes == size


def test_with_verify_every_pass_writes_other_bytes(tmp_path: Path) -> None:
    size = 20 * MIB  # requests are larger than the noise in them
    with (
        work_files(tmp_path, size=size) as file,
        Load(file, settings(size=size, bs=MIB, verify=True)) as load,
    ):
        load.lay_out()
        first = pages(file)
        load.lay_out()
        second = pages(file)
    assert len(set(first)) == len(first)
    assert not any(before == after for before, after in zip(first, second, strict=True))


def test_data_does_not_compress(tmp_path: Path) -> None:
    with work_files(tmp_path, size=4 * MIB) as file, Load(file, settings(size=4 * MIB)) as load:
        load.lay_out()
        data = on_drive(file).read_bytes()
    assert len(zlib.compress(data, 1)) > 0.99 * len(data)


def test_a_file_system_without_o_direct_is_not_measured_as_if_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap_file, "_takes_direct_transfers", lambda fd, directory, alignment: False)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(UnsafeTargetError, match="refuses O_DIRECT, so a measurement would include the page"):
        work_files(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    with work_files(tmp_path, direct=False) as file, Load(file, settings(direct=False)) as load:
        load.lay_out()
        assert load.run("write", seconds=SECONDS).write.bytes > 0


def test_no_room_is_told_in_the_words_of_a_benchmark(small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(16 * MIB)
    with pytest.raises(SwapSpaceError) as caught:
        work_files(disk, size=64 * MIB)
    assert "give a smaller --size" in str(caught.value)
    assert "host_budget" not in str(caught.value)
    assert {path.name for path in disk.iterdir()} <= {"lost+found"}


def test_a_limit_on_files_is_told_whole(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * MIB, before[1]))
    try:
        with pytest.raises(
            SwapSpaceError, match=r"ulimit -f is 8.00 MiB\); raise the limit, give a smaller --size, or name"
        ):
            work_files(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_whatever_ends_a_lane_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiering.tierbench.load.block_mover import Lane

    def fail(*_: object) -> None:
        raise RuntimeError("a lane")

    with work_files(tmp_path) as file, Load(file, settings()) as load:
        load.lay_out()
        monkeypatch.setattr(Lane, "_prepare", fail)
        with pytest.raises(RuntimeError, match="a lane"):
            load.run("read", seconds=30.0)


def test_an_engine_that_does_not_start_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiering.tierbench.load import windows as module

    def refuse(**options: object) -> None:
        raise SwapError("I/O engine 'io_uring' cannot start", errno=1, filename="", offset=0)

    monkeypatch.setattr(module, "AioContext", refuse)
    with work_files(tmp_path) as file, pytest.raises(SwapError, match="cannot start"):
        Load(file, settings(ioengine="io_uring"))


rates = st.lists(st.tuples(st.floats(0.05, 0.4), st.floats(0, 1e9)), min_size=1, max_size=40)


@given(rates)
def test_the_worst_second_is_the_least_of_all_stretches_of_a_second(
    stretches: list[tuple[float, float]],
) -> None:
    at, samples = 0.0, []
    for took, rate in stretches:
        at += took
        samples.append(Sample(at=at, read=rate, write=0.0))
    starts = [0.0, *(sample.at for sample in samples)]
    rates = []
    for last in range(len(samples)):
        for first in reversed(range(last + 1)):  # the shortest stretch of a second that ends there
            took = samples[last].at - starts[first]
            if took >= 1.0:
                moved = sum(samples[i].read * (samples[i].at - starts[i]) for i in range(first, last + 1))
                rates.append(moved / took)
                break
    worst = worst_second(samples)
    assert worst == (pytest.approx(min(rates), abs=1e-3) if rates else None)
