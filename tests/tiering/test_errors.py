"""What an error says, whole and in parts."""

from __future__ import annotations

import pytest

from tiering.errors import ConfigError, TieringError, WeightsError


@pytest.mark.parametrize("words", ["it is wrong; mend it", "a ] b; c; d", "no remedy", ""])
def test_words_are_the_message_without_its_code(words: str) -> None:
    for kind in (TieringError, ConfigError):
        error = kind(words)
        assert error.words == words
        assert str(error) == f"[{kind.code}] {words}"


def test_what_is_wrong_with_weights_is_told_without_the_remedy_too() -> None:
    error = WeightsError("a; b] holds nothing", "download it again; or another")
    assert error.what == "a; b] holds nothing"
    assert error.words == "a; b] holds nothing; download it again; or another"
    assert str(error) == f"[TIER-WEIGHTS] {error.words}"
