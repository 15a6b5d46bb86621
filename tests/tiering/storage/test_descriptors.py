"""Descriptors that are a process's own: forked children have none of them, and there is room for more than 1024."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.tiering.checkpoint.saving import write_checkpoint
from tiering.checkpoint.reader import open_checkpoint
from tiering.config.training import IoConfig
from tiering.errors import SwapSpaceError
from tiering.storage import swap_file
from tiering.storage.arena import PAGE
from tiering.storage.descriptors import close_alone, open_alone
from tiering.storage.swap_file import SwapFile
from tiering.weights.reader import WeightReader
from tiering.weights.sums_file import SumsFile
from tiering.weights.tensor_file import Output, TensorFileWriter, TensorSpec

IO = IoConfig(engine="threads")


def open_names(path: Path) -> set[str]:
    """The files below ``path`` that this process has open."""
    names = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the list itself
            target = descriptor.readlink()
            if path in target.parents:
                names.add(target.name)
    return names


def held_by_child(path: Path) -> str:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, repr(sorted(open_names(path))).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(write)
    with os.fdopen(read) as answer:
        return answer.read()


def test_a_child_has_none_of_what_is_saved_and_loaded(tmp_path: Path) -> None:
    with Output(IO) as output:
        (tmp_path / "old").mkdir()
        write_checkpoint(tmp_path / "old", 1, output)
        weights = open_checkpoint(tmp_path / "old").weights
        tensor = weights.tensors["bias"]
        writer = TensorFileWriter(tmp_path / "new", [TensorSpec("a", "U8", (5,))], output=output)
        with closing(SumsFile(tmp_path / "sums", {"new": 1})), WeightReader(weights, IO) as reader:
            reader.read(tensor, 0, tensor.numel)
            sums = next(iter(weights.sums)).name.replace("weights", "checksums")
            assert open_names(tmp_path) == {"new", "sums", tensor.file.name, sums}
            assert held_by_child(tmp_path) == "[]"
            assert open_names(tmp_path) == {"new", "sums", tensor.file.name, sums}
        writer.abandon()
    del weights, reader
    assert open_names(tmp_path) == set()


def test_a_child_forked_while_a_swap_file_is_made_has_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve, in_child = swap_file._fallocate, list[str]()

    def fork_and_reserve(fd: int, nbytes: int) -> int:
        in_child.append(held_by_child(tmp_path))
        return reserve(fd, nbytes)

    monkeypatch.setattr(swap_file, "_fallocate", fork_and_reserve)
    with closing(SwapFile(tmp_path, PAGE)):
        assert in_child == ["[]"]
        assert len(open_names(tmp_path)) == 1
        assert held_by_child(tmp_path) == "[]"
    assert open_names(tmp_path) == set()


def test_a_swap_file_that_could_not_be_made_closes_no_other_file_in_a_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap_file, "wait_for_space", lambda *_: False)
    opened, numbers = swap_file._open, list[int]()

    def open_and_note(directory: Path, direct: bool) -> tuple[int, bool, bool]:
        result = opened(directory, direct)
        numbers.append(result[0])
        return result

    monkeypatch.setattr(swap_file, "_open", open_and_note)
    # The error's traceback keeps the object of the failed file.
    with pytest.raises(SwapSpaceError, match="needs 4096 bytes") as failure:
        SwapFile(tmp_path, PAGE)
    with (tmp_path / "other").open("w") as other:
        assert [other.fileno()] == numbers
        assert held_by_child(tmp_path) == "['other']"
    assert failure.tb is not None


def test_closed_is_closed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    fd = open_alone(tmp_path / "file", os.O_RDONLY)
    assert not os.get_inheritable(fd)
    close_alone(fd)
    close_alone(fd)
    assert open_names(tmp_path) == set()


MANY = """
import resource, sys
from pathlib import Path
hard = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
from tiering.checkpoint.inspection import inspect
report = inspect(Path(sys.argv[1]))
print(report.whole, resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 64, *(each.problem for each in report.damage))
"""


@pytest.mark.slow
def test_a_checkpoint_of_more_files_than_the_limit(tmp_path: Path) -> None:
    """The limit is raised; where that is not allowed, the limit is what is told, and not that there is damage alone."""
    with Output(IO) as output:
        write_checkpoint(tmp_path, 1, output, ranks=40)

    def output_of(hard: int) -> str:
        command = [sys.executable, "-c", MANY, str(tmp_path), str(hard)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert output_of(1024) == "True True\n"
    assert output_of(64).startswith("False False") and "Too many open files" in output_of(64)
