"""Numbers before nouns. The sidecar has its own helper, because it imports only telemetry."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from service import formatting
from tiering import _text


@pytest.mark.parametrize("counted", [_text.counted, formatting.counted], ids=["tiering", "service"])
def test_one_is_singular(counted: Callable[..., str]) -> None:
    assert [counted(number, "file") for number in (0, 1, 2, 11)] == [
        "0 files",
        "1 file",
        "2 files",
        "11 files",
    ]
    assert [counted(number, "directory", "directories") for number in (1, 2)] == [
        "1 directory",
        "2 directories",
    ]
