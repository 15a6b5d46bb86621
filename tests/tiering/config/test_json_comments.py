from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.config.json_comments import key_lines, plain

WRITTEN = """\
// of the cluster
{
  "a": 1, # old
  "b": { /* two
            lines */ "c": [{"x": 1}, 2,],
         "url": "http://x#y", },
  "d.e": "a \\" // b",
}
"""


def test_comments_and_trailing_commas_are_left_out_and_nothing_moves() -> None:
    result = plain(WRITTEN)
    assert json.loads(result) == {
        "a": 1,
        "b": {"c": [{"x": 1}, 2], "url": "http://x#y"},
        "d.e": 'a " // b',
    }
    assert [len(line) for line in result.split("\n")] == [len(line) for line in WRITTEN.split("\n")]


def test_keys_know_their_lines() -> None:
    assert key_lines(plain(WRITTEN)) == {
        ("a",): 3,
        ("b",): 4,
        ("b", "c"): 5,
        ("b", "url"): 6,
        ("d.e",): 7,
    }


@pytest.mark.parametrize(
    "text", ["{,}", "[,]", '{"a": 1,,}', '{"a" 1}', '{"a": "b}', "/* {}", "{} }", '{"a": 1 / 2}']
)
def test_what_is_wrong_stays_wrong(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 # json's own words
        json.loads(plain(text))


def _objects(inner: Any) -> Any:
    return st.dictionaries(st.text(), inner, max_size=4)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner) | _objects(inner)
)


@given(_objects(JSON), st.sampled_from([None, 2]))
def test_json_without_comments_is_what_it_was(value: dict[str, Any], indent: int | None) -> None:
    text = json.dumps(value, indent=indent)
    assert plain(text) == text
    paths = dict.fromkeys(_paths(value))
    assert set(key_lines(text)) == set(paths)


def _paths(value: Any, above: tuple[str, ...] = ()) -> Any:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield (*above, name)
            yield from _paths(inner, (*above, name))


@given(st.text(alphabet='{}[],:"/*#\\ \n1ab'))
def test_no_text_is_too_odd(text: str) -> None:
    result = plain(text)
    assert len(result) == len(text)
    assert result.count("\n") == text.count("\n")
