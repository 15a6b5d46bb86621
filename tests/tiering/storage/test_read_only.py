"""Homes in the files of a user: pure layouts of reads, and reads of real files."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.errors import SwapError, WeightsError
from tiering.storage.aio import AioContext
from tiering.storage.arena import PAGE, Arena, round_up
from tiering.storage.file_system import FileVersion
from tiering.storage.read_only import FileRange, HomeInFiles, ReadLayout, ReadOnlyFiles
from tiering.storage.tickets import Ticket

ALIGNMENT = 256
FILES = (Path("first"), Path("second"))
SIZE = 20 * PAGE + 1000
CONTENTS = {path: os.urandom(SIZE) for path in FILES}


@st.composite
def homes(draw: st.DrawFn) -> tuple[list[FileRange], int]:
    """Ranges of two files, adjacent ones among them, at multiples of 256 in a home; and the bytes of the home."""
    ranges: list[FileRange] = []
    at = 0
    for number in range(draw(st.integers(0, 8))):
        adjacent = bool(ranges) and draw(st.integers(0, 3)) > 0 and ranges[-1].end < SIZE
        file = ranges[-1].file if adjacent else draw(st.sampled_from(FILES))
        offset = ranges[-1].end if adjacent else draw(st.integers(0, 16) | st.integers(0, SIZE - 1))
        nbytes = min(draw(st.integers(1, 300) | st.integers(1, 3 * PAGE)), SIZE - offset)
        ranges.append(FileRange(f"tensor {number}", file, offset, nbytes, at))
        # The next part of one tensor follows without a gap.
        at = at + nbytes if draw(st.booleans()) else round_up(at + nbytes, ALIGNMENT)
    return ranges, max(PAGE, round_up(at)) + PAGE * draw(st.integers(0, 2))


def arranged(layout: ReadLayout, ranges: list[FileRange], nbytes: int) -> bytes:
    """What the reads of ``layout`` bring, by plain copies, at the places of ``ranges``."""
    memory = bytearray(b"\xee" * layout.room)
    for read in layout.reads:
        assert read.offset % PAGE == read.at % PAGE == 0
        assert read.offset + read.nbytes <= SIZE
        landed = CONTENTS[read.file][read.offset : read.offset + read.nbytes]
        memory[read.at : read.at + read.nbytes] = landed
    layout.arrange(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    return bytes(memory[:nbytes])


@given(homes())
def test_every_byte_gets_to_its_place(home: tuple[list[FileRange], int]) -> None:
    ranges, nbytes = home
    layout = ReadLayout.of(ranges, dict.fromkeys(FILES, SIZE), nbytes)
    content = arranged(layout, ranges, nbytes)
    for each in ranges:
        expected = CONTENTS[each.file][each.offset : each.end]
        assert content[each.at : each.at + each.nbytes] == expected, each
    # At most two pages more than the bytes for each read, and one for gaps that move its bytes to the right.
    assert layout.nbytes <= sum(each.nbytes for each in ranges) + 2 * PAGE * len(layout.reads)
    assert layout.room <= nbytes + 3 * PAGE * max(1, len(layout.reads))
    assert len(layout.reads) <= len(ranges)


@given(homes(), st.data())
def test_a_part_of_a_home_has_its_bytes(home: tuple[list[FileRange], int], data: st.DataObject) -> None:
    ranges, nbytes = home
    sizes = dict.fromkeys(FILES, SIZE)
    in_files = HomeInFiles(nbytes, 0, (), tuple(ranges), sizes)
    start = data.draw(st.integers(0, nbytes - 1))
    end = data.draw(st.integers(start + 1, nbytes))
    whole = arranged(ReadLayout.of(ranges, sizes, nbytes), ranges, nbytes)
    part = arranged(in_files.cut(start, end), ranges, end - start)
    for each in ranges:
        first, last = max(each.at, start), min(each.at + each.nbytes, end)
        if first < last:
            assert part[first - start : last - start] == whole[first:last]


def test_neighbours_in_a_file_are_one_read() -> None:
    first = FileRange("a", FILES[0], 40, 1000, 0)
    second = FileRange("b", FILES[0], 1040, 5000, 1024)
    third = FileRange("c", FILES[0], 6040 + 2 * PAGE, 10, 6144)
    sizes = dict.fromkeys(FILES, SIZE)
    layout = ReadLayout.of([first, second, third], sizes, 2 * PAGE)
    assert [(read.offset, read.nbytes) for read in layout.reads] == [(0, 2 * PAGE), (3 * PAGE, PAGE)]
    # The bytes of ``b`` are 16 bytes further to the right at home than in the file: they land a page later.
    assert layout.moves[1].source >= layout.moves[1].target


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(CONTENTS[FILES[0]])
    return path


@pytest.fixture
def files(path: Path) -> Iterator[ReadOnlyFiles]:
    aio = AioContext()
    with path.open("rb") as file:
        version = FileVersion.of(file.fileno())
    files = ReadOnlyFiles({path: version}, aio)
    yield files
    aio.close()
    files.close()


def home_in(files: ReadOnlyFiles, path: Path) -> HomeInFiles:
    # The last bytes of the file: its last page is incomplete.
    ranges = [FileRange("a", path, 9, 2 * PAGE, 0), FileRange("b", path, SIZE - 700, 700, 2 * PAGE)]
    return files.home(ranges, 3 * PAGE, 5 * PAGE, ("a", "b"))


def test_a_file_is_read_where_it_is(files: ReadOnlyFiles, path: Path) -> None:
    in_files = home_in(files, path)
    arena = Arena.map(8 * PAGE, "test")
    lease = arena.lease(8 * PAGE, "test")
    assert files.read(in_files, lease).wait() == in_files.layout.nbytes == 3 * PAGE + SIZE % PAGE
    in_files.layout.arrange(lease.address)
    content = CONTENTS[FILES[0]]
    assert bytes(lease.view[: 2 * PAGE]) == content[9 : 9 + 2 * PAGE]
    assert bytes(lease.view[2 * PAGE : 2 * PAGE + 700]) == content[-700:]
    # Bytes that no file has are zero where they are loaded.
    assert bytes(files.load(in_files, PAGE, 2 * PAGE).wait()) == content[9 + PAGE : 9 + 2 * PAGE] + content[
        -700:
    ] + bytes(PAGE - 700)
    assert in_files.place_of(2 * PAGE + 1) == f"'b' in {path}"
    with pytest.raises(ValueError, match=f"needs {in_files.layout.room} bytes"):
        files.read(in_files, lease.part(0, 3 * PAGE))
    lease.release()


def test_an_interrupted_read_leaves_nothing(
    files: ReadOnlyFiles, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_files = home_in(files, path)
    arena = Arena.map(8 * PAGE, "test")
    lease = arena.lease(8 * PAGE, "test")

    def interrupted(ticket: Ticket) -> Ticket:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Ticket, "begin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            files.read(in_files, lease)
    files.settle(in_files)
    assert files.read(in_files, lease).wait() == in_files.layout.nbytes
    # The second one: the first would keep its buffer for ever.
    assert [ticket.has_begun for ticket in in_files.in_flight] == [True]
    lease.release()


def wait_for_another_time(path: Path) -> None:
    """Until the file system's clock, which some kernels set every few milliseconds, has gone on since ``path``."""
    probe = path.with_name("probe")
    while True:
        probe.touch()
        if probe.stat().st_ctime_ns > path.stat().st_ctime_ns:
            return


@pytest.mark.parametrize("change", ["append", "write", "touch", "replace"])
def test_a_change_is_found(files: ReadOnlyFiles, path: Path, change: str) -> None:
    in_files = home_in(files, path)
    files.check()
    status = path.stat()
    wait_for_another_time(path)
    if change == "append":
        with path.open("ab") as file:
            file.write(b"x")
    elif change == "write":
        with path.open("r+b") as file:
            file.write(b"x")
        # A program may set the times of content, but not that of the change itself.
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    elif change == "touch":
        path.touch()
    else:
        other = path.with_name("other")
        other.write_bytes(CONTENTS[FILES[1]])
        other.replace(path)
    with pytest.raises(WeightsError, match=rf"TIER-WEIGHTS.*{path}.*weights_in_place to false") as raised:
        files.check()
    assert (f"it had {SIZE} bytes and has {SIZE + 1}" in str(raised.value)) == (change == "append")
    with pytest.raises(WeightsError, match="has changed while this run reads"):
        files.load(in_files, 0, PAGE).wait()


def test_a_file_that_changed_before_is_refused(files: ReadOnlyFiles, path: Path) -> None:
    path.write_bytes(b"short")
    with pytest.raises(WeightsError, match="has changed since its header was read"):
        home_in(files, path)
    assert files.paths == ()


def test_a_file_that_shrinks_fails_its_read(files: ReadOnlyFiles, path: Path) -> None:
    in_files = home_in(files, path)
    os.truncate(path, 2 * PAGE)
    with pytest.raises(SwapError, match=r"'a', 'b'.*ENODATA"):
        files.load(in_files, 0, 3 * PAGE).wait()
