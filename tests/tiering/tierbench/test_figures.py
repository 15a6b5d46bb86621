"""Figures as people read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.tierbench.display import figures

from . import results


@given(st.floats(1e-6, 1e12))
def test_three_digits_are_kept_and_no_exponent_is_written(value: float) -> None:
    text = figures.number(value)
    assert "e" not in text
    assert float(text.replace(",", "")) == pytest.approx(value, rel=0.005)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (figures.number(0.0), "0"),
        (figures.number(9.999), "10.0"),
        (figures.gb(1.8349e9), "1.83"),
        (figures.gib(2**30), "1.00"),
        (figures.nbytes(0), "0 B"),
        (figures.nbytes(999.96e9), "1.00 TB"),  # rounded first, then given its unit
        (figures.operations(745), "745"),
        (figures.operations(45_321), "45.3k"),
        (figures.operations(1.234e6), "1.23M"),
        (figures.latency(84.2e-6), "84.2us"),
        (figures.latency(999.9e-6), "1.00ms"),
        (figures.latency(2.31), "2.31s"),
        (figures.duration(48.3, 2), "48 s"),
        (figures.duration(740), "12.3 min"),
        (figures.duration(7560), "2.10 h"),
        (figures.legible("a\x1b[2J\n[b]"), "a\\x1b[2J\\n[b]"),
    ],
)
def test_what_is_written(text: str, expected: str) -> None:
    assert text == expected


def test_the_window_of_sustained_has_a_name_of_its_own() -> None:
    assert [name for name, _ in figures.named_rows(results.TWO)] == [
        "sustained write",
        "read",
        "write",
        "mixed",
    ]
    again = results.TWO.model_copy(update={"rows": (results.LONG_WRITE, results.LONG_WRITE)})
    assert [name for name, _ in figures.named_rows(again)] == ["sustained write", "write"]
    assert [name for name, _ in figures.named_rows(results.VIRTIO)] == ["read", "random read", "random mixed"]


def test_the_load_is_told_in_words_of_fio() -> None:
    text = figures.load(results.VIRTIO)
    assert text == "bs 1M (1048576 bytes), iodepth 16, numjobs 1, size 4G, O_DIRECT"
    assert figures.load(results.BUFFERED).endswith("buffered (page cache and drive together)")
    skewed = results.NVME.model_copy(
        update={"settings": results.NVME.settings.model_copy(update={"rwmixread": 70, "size": 3 << 19})}
    )
    assert "size 1536K, rwmixread 70, O_DIRECT" in figures.load(skewed)
    unwritten = skewed.model_copy(update={"settings": skewed.settings.model_copy(update={"size": 0})})
    assert "size 0," in figures.load(unwritten)
