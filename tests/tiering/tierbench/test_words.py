"""fio's words: sizes, rates, times, kinds, engines."""

from __future__ import annotations

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.tierbench import words


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4K", 4096),
        ("4k", 4096),
        ("1M", 1 << 20),
        ("1MiB", 1 << 20),
        ("1MB", 10**6),
        ("1G", 1 << 30),
        ("1.5G", 3 << 29),
        ("512", 512),
    ],
)
def test_a_size(text: str, nbytes: int) -> None:
    assert words.size(text) == nbytes


@given(count=st.integers(1, 1 << 20), unit=st.sampled_from([1, 1 << 10, 1 << 20, 1 << 30]))
def test_a_size_in_letters_is_read_back(count: int, unit: int) -> None:
    text = words.brief(count * unit)
    assert words.size(text) == count * unit
    assert unit == 1 or not text.isdigit()


@pytest.mark.parametrize("text", ["0", "-1", "4X", "", "M"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        words.size(text)


@pytest.mark.parametrize(
    ("text", "rate"), [("3GiB/s", 3 << 30), ("3GB/s", 3e9), ("500M", 500 << 20), (" 2G/s ", 2 << 30)]
)
def test_a_rate(text: str, rate: float) -> None:
    assert words.rate(text) == rate


@pytest.mark.parametrize(
    ("text", "seconds"), [("10", 10), ("10s", 10), ("500ms", 0.5), ("1.5m", 90), ("1h", 3600), ("0", 0)]
)
def test_a_time(text: str, seconds: float) -> None:
    assert words.duration(text) == seconds


@pytest.mark.parametrize("text", ["-1", "1d", "s", "1 2"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="with ms, s, m or h"):
        words.duration(text)


@pytest.mark.parametrize("text", ["169h", "9" * 400])
def test_what_is_too_long_a_time(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="more than a week"):
        words.duration(text)


def test_kinds_come_in_the_order_asked_for_and_once() -> None:
    assert words.kinds("write,read,write,readwrite,randrw,mixed") == ("write", "read", "rw", "randrw")
    with pytest.raises(
        argparse.ArgumentTypeError, match="'trim' is not a kind of load; choose from read, write, rw"
    ):
        words.kinds("read,trim")


def test_fios_synchronous_engines_are_threads() -> None:
    assert [words.engine(name) for name in ("psync", "io_uring", "auto")] == ["threads", "io_uring", "auto"]
    with pytest.raises(argparse.ArgumentTypeError, match="unknown engine 'spdk'"):
        words.engine("spdk")


def test_which_kinds_read_and_write() -> None:
    assert [rw for rw in words.READ_WRITE if words.reads(rw)] == ["read", "rw", "randread", "randrw"]
    assert [rw for rw in words.READ_WRITE if words.writes(rw)] == ["write", "rw", "randwrite", "randrw"]
