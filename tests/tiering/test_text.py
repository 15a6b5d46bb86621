"""Texts for messages: the name that somebody has probably meant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering._text import similar

KEYS = (
    *(
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_clipping",
        "optimizer",
        "amp",
        "timers",
    ),
    *("data_parallel_size", "free_activation", "ns_method", "lr", "_tiers", "_gradients"),
)


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("train_batchsize", "train_batch_size"),
        ("TRAIN_BATCH_SIZE", "train_batch_size"),
        ("train_micro_batch_size", "train_micro_batch_size_per_gpu"),
        ("gradient_cliping", "gradient_clipping"),
        ("optmiizer", "optimizer"),
        ("optimiser", "optimizer"),
        ("r", "lr"),
        # Too far away to be a misspelling.
        ("warmup", None),
        ("init_method", None),
        ("model_parallel_size", None),
        ("activation", None),
        ("train", None),
        # Near a private name only.
        ("gradients", None),
    ],
)
def test_the_name_that_is_meant(word: str, name: str | None) -> None:
    assert similar(word, KEYS) == name


NAMES = st.text("abcdefgh_", min_size=4, max_size=20).filter(lambda name: not name.startswith("_"))


@given(NAMES, st.integers(0, 19), st.sampled_from("xyz"))
def test_one_edit_is_found_and_a_stranger_is_not(name: str, place: int, letter: str) -> None:
    place %= len(name)
    for word in (
        name[:place] + letter + name[place:],
        name[:place] + letter + name[place + 1 :],
        name[:place] + name[place + 1 :],
    ):
        assert similar(word, [name]) == name
    assert similar("x" * len(name) + "yyyy", [name]) is None
