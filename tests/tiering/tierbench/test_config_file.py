"""A section set in a configuration file: what else is in it stays to the byte, and what cannot be edited is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.config.ds_config import load
from tiering.config.training import IoConfig
from tiering.errors import ConfigError
from tiering.tierbench.tuning.config_file import check, edited, write

IO = {"engine": "libaio", "block_size": "512KiB", "queue_depth": 32, "registered": False}
BLOCK = {"tiering": {"io": IO}}
ONE_LINE = json.dumps(BLOCK)[1:-1]

PEOPLES = """\
{
    // how it is trained
    "train_batch_size": 16, # of all ranks
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8},
    "tiering": {
        /* of the first
           machine */
        "io": {"queue_depth": 8, /* why not */ "block_size": 4096,},
        "verify": true, // it is cheap
    },
}
"""


def test_values_are_replaced_and_the_rest_stays_to_the_byte() -> None:
    new = edited(PEOPLES, BLOCK)
    assert new == PEOPLES.replace(
        '{"queue_depth": 8, /* why not */ "block_size": 4096,}',
        '{"queue_depth": 32, /* why not */ "block_size": "512KiB", "engine": "libaio", "registered": false}',
    )
    assert edited(new, BLOCK) == new


@pytest.mark.parametrize(
    ("text", "new"),
    [
        ("{}", f"{{{ONE_LINE}}}"),
        ('\ufeff{"a": 1}', f'\ufeff{{"a": 1, {ONE_LINE}}}'),
        ('{"a": 1,}\n', f'{{"a": 1, {ONE_LINE}}}\n'),
        ('{\n  "a": 1\n}', f'{{\n  "a": 1,\n  {ONE_LINE}\n}}'),
        ('{\n  "a": 1, // one, two\n}', f'{{\n  "a": 1, // one, two\n  {ONE_LINE}\n}}'),
        ('{\n  "a": 1 // one, two\n}', f'{{\n  "a": 1, // one, two\n  {ONE_LINE}\n}}'),
        ('{ "a": {}, // {\n\t"b": [NaN] # }\n\n}', f'{{ "a": {{}}, // {{\n\t"b": [NaN], # }}\n\t{ONE_LINE}\n\n}}'),
        ('{\r\n\t"a": 1\r\n}\r\n', f'{{\r\n\t"a": 1,\r\n\t{ONE_LINE}\r\n}}\r\n'),
        ('/* { */ {"tiering": {}}', f'/* {{ */ {{"tiering": {ONE_LINE.split(": ", 1)[1]}}}'),
    ],
)  # fmt: skip
def test_what_is_not_there_comes_last_and_looks_like_its_neighbours(text: str, new: str) -> None:
    assert edited(text, BLOCK) == new


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    ),
    st.dictionaries(st.text() | st.sampled_from(["io", "engine"]), st.integers(), max_size=3),
    st.sampled_from([None, 0, 1, 4, "\t"]),
    st.booleans(),
)
def test_any_file_has_what_it_had_and_the_section(
    other: Any, io: dict[str, int], indent: int | str | None, plain: bool
) -> None:
    old = {'a "key" {': other, "tiering": {"io": io, "last": [io]}, "tail": "}"}
    new = json.loads(edited(json.dumps(old, indent=indent, ensure_ascii=plain), BLOCK))
    assert new == {**old, "tiering": {"io": io | IO, "last": [io]}}
    assert list(new) == list(old)


def test_the_file_is_replaced_at_once_and_is_read_as_it_was_meant(tmp_path: Path) -> None:
    file, link = tmp_path / "ds.json", tmp_path / "link.json"
    file.write_bytes(PEOPLES.encode())
    file.chmod(0o640)
    link.symlink_to(file)
    check(link, BLOCK)
    assert file.read_text() == PEOPLES
    write(link, BLOCK)
    assert link.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o640
    assert sorted(tmp_path.iterdir()) == [file, link]
    config, _ = load(file)
    assert config.tiering.io == IoConfig(
        engine="libaio", block_size=512 << 10, queue_depth=32, registered=False
    )
    assert config.tiering.verify


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1', "cannot be edited: it is not valid JSON"),
        ("[]", "it is not a JSON object"),
        ('{"a": 1, "a": 2}', "'a' appears twice"),
        ('{"tiering": {"io": 3}}', "tiering.io is 3, not a section"),
        (b"\xff\xfe", "is not valid UTF-8"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_what_cannot_be_edited_is_told_and_left_alone(
    tmp_path: Path, text: str | bytes | None, message: str
) -> None:
    file = tmp_path / "ds.json"
    before = text.encode() if isinstance(text, str) else text
    if before is not None:
        file.write_bytes(before)
    for edit in (check, write):
        with pytest.raises(ConfigError, match=message) as refused:
            edit(file, BLOCK)
        assert "--write-config" in str(refused.value)
    assert before is None or file.read_bytes() == before
