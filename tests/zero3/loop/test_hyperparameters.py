"""Hyperparameters in words: equal for equal numbers, and an error that has both values."""

from __future__ import annotations

import pytest
import torch

from tiering.errors import ConfigError
from zero3.loop.hyperparameters import check_same, described, digest

NAMES = ["lr", "betas", "eps"]


def test_equal_numbers_are_described_alike_whatever_holds_them() -> None:
    plain = [{"params": [], "lr": 0.5, "betas": (0.75, 1), "eps": 0}]
    tensors = [{"lr": torch.tensor(0.5), "betas": [0.75, torch.tensor(1.0)], "eps": False}]
    lines = described(plain, NAMES)
    assert lines == described(tensors, NAMES)
    assert lines == [
        "betas (0.75, 1.0) in param group 0",
        "eps 0.0 in param group 0",
        "lr 0.5 in param group 0",
    ]


def test_what_a_script_keeps_in_a_group_is_not_compared() -> None:
    assert described([{"lr": 0.5, "initial_lr": 1.0, "name": "rank 0"}], ["lr"]) == [
        "lr 0.5 in param group 0"
    ]


def test_a_digest_is_a_whole_float64_and_tells_the_smallest_difference() -> None:
    first, other = (digest(described([{"lr": lr}], ["lr"])) for lr in (1e-3, 1e-3 + 2**-62))
    assert first != other
    assert first == torch.tensor(first, dtype=torch.float64).item() == int(first) < 2**48


def test_the_error_names_both_values_and_the_rank() -> None:
    lines = [described([{"lr": 0.5}, {"lr": lr}], ["lr"]) for lr in (0.1, 0.1, 0.2)]
    with pytest.raises(
        ConfigError, match=r"lr 0\.1 in param group 1 on rank 0, and lr 0\.2 in param group 1 on rank 2"
    ):
        check_same(dict(enumerate(lines)), 4)
    check_same(dict(enumerate(lines[:2])), 4)
