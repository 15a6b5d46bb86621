"""Files that are written piece by piece are what safetensors reads, with the sums of what is on the disk."""

from __future__ import annotations

import errno
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from tiering.errors import CheckpointError
from tiering.storage import arena
from tiering.storage.aio import AioContext, Fault, FaultPlan
from tiering.storage.arena import PAGE, round_up
from tiering.weights import tensor_file
from tiering.weights.pages import sums_of
from tiering.weights.tensor_file import WINDOW, Output, TensorFileWriter, TensorSpec, pages_of

SIZES = st.lists(
    st.sampled_from([0, 1, 7, 1000, PAGE // 4, WINDOW // 4 - 3, WINDOW // 4, 600_000]), max_size=4
)


def written(path: Path, output: Output, tensors: dict[str, np.ndarray], cuts: list[int]) -> np.ndarray:
    """The sums that were told of the file."""
    specs = [TensorSpec(name, "F32", tensor.shape) for name, tensor in tensors.items()]
    sums = np.zeros(pages_of(specs, {"a": "5"}), dtype="<u4")

    def put(page: int, values: np.ndarray) -> None:
        sums[page : page + values.size] = values

    file = TensorFileWriter(path, specs, {"a": "5"}, output=output, on_sums=put)
    content = b"".join(tensor.tobytes() for tensor in tensors.values())
    ends = sorted({cut % (len(content) + 1) for cut in cuts} | {0, len(content)})
    for first, last in pairwise(ends):
        file.append(content[first:last])
    file.close()
    assert path.stat().st_size == file.nbytes
    return sums


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(SIZES, st.lists(st.integers(0, 10**7), max_size=6))
def test_whatever_is_appended_in_whatever_pieces(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], cuts: list[int]
) -> None:
    path = tmp_path_factory.mktemp("files") / "tensors.safetensors"
    tensors = {
        f"tensor {number}": np.random.default_rng(number).standard_normal(size, dtype=np.float32)
        for number, size in enumerate(sizes)
    }
    with Output() as output:
        sums = written(path, output, tensors, cuts)
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    assert all(np.array_equal(loaded[name], tensors[name]) for name in tensors)
    content = np.fromfile(path, np.uint8)
    (length,) = struct.unpack("<Q", content[:8].tobytes())
    assert (8 + length) % PAGE == 0, "tensors do not begin on a page"
    whole = np.zeros(round_up(content.size) + PAGE, np.uint8)
    whole = whole[-whole.ctypes.data % PAGE :][: round_up(content.size)]
    whole[: content.size] = content
    assert np.array_equal(sums, sums_of(whole.ctypes.data, whole.size // PAGE))


def test_too_much_or_too_little_is_no_file(tmp_path: Path) -> None:
    with Output() as output:
        file = TensorFileWriter(tmp_path / "file", [TensorSpec("a", "F32", (3,))], output=output)
        with pytest.raises(ValueError, match="more were appended"):
            file.append(bytes(13))
        file.append(bytes(11))
        with pytest.raises(ValueError, match="must have"):
            file.close()
        file.abandon()
        file.abandon()
        with pytest.raises(CheckpointError, match="another process writes there"):
            TensorFileWriter(tmp_path / "file", [], output=output)
        with pytest.raises(CheckpointError, match="its directory was removed"):
            TensorFileWriter(tmp_path / "gone" / "file", [], output=output)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_file_that_fails_is_named_and_gives_its_windows_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """Else the fifth file would wait for one of the four windows for ever."""
    plan = FaultPlan((Fault("write", first=1, error=error, count=0),))
    monkeypatch.setattr(tensor_file, "AioContext", lambda **options: AioContext(fault=plan, **options))
    monkeypatch.setattr(arena, "STARVED_AFTER_SECONDS", 5.0)
    content = bytes(3 * WINDOW)
    with Output() as output:
        for number in range(6):
            path = tmp_path / str(number)
            file = TensorFileWriter(path, [TensorSpec("a", "F32", (3 * WINDOW // 4,))], output=output)
            with pytest.raises(
                CheckpointError, match=f"{path}: it cannot be written: {errno.errorcode[error]}"
            ):
                _finish(file, content)
            file.abandon()


def _finish(file: TensorFileWriter, content: bytes) -> None:
    file.append(content)
    file.close()


def test_short_transfers_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = FaultPlan(tuple(Fault("write", first=first, short=PAGE) for first in (1, 3, 4)))
    monkeypatch.setattr(tensor_file, "AioContext", lambda **options: AioContext(fault=plan, **options))
    tensor = np.arange(WINDOW // 2, dtype=np.float32)
    with Output() as output:
        written(tmp_path / "file", output, {"a": tensor}, [])
    assert np.array_equal(load_file(tmp_path / "file")["a"], tensor)
