"""Sums are kept whole, also where the system writes a part of what it is given."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tiering.weights.files import open_weights
from tiering.weights.pages import SUM
from tiering.weights.sums_file import SumsFile


def test_what_the_system_writes_in_parts_is_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, content, at: pwrite(fd, content[:5], at))
    path, sums = tmp_path / "sums.safetensors", np.arange(1, 8, dtype="<u4")
    file = SumsFile(path, {"a": 3, "b": 7})
    file.of("b")(0, sums[:4])
    file.of("b")(4, sums[4:])
    file.close()
    stored = open_weights(path).tensors["b"]
    begin = stored.offset
    assert path.read_bytes()[begin : begin + 7 * SUM] == sums.tobytes()
