"""The message of an error, with and without code and remedy."""

from __future__ import annotations

import pytest

from tiering.errors import ConfigError, TieringError, WeightsError


@pytest.mark.parametrize("message", ["it is wrong; mend it", "a ] b; c; d", "no remedy", ""])
def test_the_message_has_no_code(message: str) -> None:
    for kind in (TieringError, ConfigError):
        error = kind(message)
        assert error.message == message
        assert str(error) == f"[{kind.code}] {message}"


def test_the_problem_of_weights_has_no_remedy() -> None:
    error = WeightsError("a; b] holds nothing", "download it again; or another")
    assert error.problem == "a; b] holds nothing"
    assert error.message == "a; b] holds nothing; download it again; or another"
    assert str(error) == f"[TIER-WEIGHTS] {error.message}"
