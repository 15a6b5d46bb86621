"""Every file of ``ds_files/`` gets the report that it says itself."""

from __future__ import annotations

import pytest

from tiering.config.ds_config import examine, load, value_of
from tiering.config.training import TieringConfig
from tiering.errors import ConfigError

from .ds_shapes import content, names, shapes


def test_there_are_as_many_as_the_wild_has() -> None:
    assert len(shapes()) >= 90
    assert sum(bool(shape.refused) for shape in shapes().values()) >= 30


@pytest.mark.parametrize("name", shapes())
def test_a_file_gets_its_report(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shapes()[name]
    for variable, value in shape.environment.items():
        monkeypatch.setenv(variable, value)
    config, report = examine(shape.path, world_size=shape.ranks, context=shape.known)
    entries = {entry.key: entry for entry in report.entries}
    assert len(entries) == len(report.entries)
    assert {
        (key, str(entries[key].verdict), str(entries[key].origin)) for key in entries.keys() - shape.absent
    } == {(key, str(fate.verdict), str(fate.origin)) for key, fate in shape.fates.items()}
    expected = shape.absent | {key: fate.words for key, fate in shape.fates.items()}
    assert {key: words for key, words in expected.items() if words not in entries[key].note} == {}
    # what is not in the report by itself is part of a section that is
    for key in names(content(shape)):
        assert any(key == entry or key.startswith(f"{entry}.") for entry in entries), key

    if config is None:
        assert {entry.key for entry in report.refused} == shape.refused != set()
        with pytest.raises(ConfigError) as caught:
            load(shape.path, world_size=shape.ranks, context=shape.known)
        assert all(f"{key}: " in str(caught.value) for key in shape.refused)
        return
    assert shape.refused == set()
    assert {field: value_of(config, field) for field in shape.gives} == shape.gives
    assert load(content(shape), world_size=shape.ranks, context=shape.known)[0] == config
    assert TieringConfig.model_validate(config.model_dump(exclude_defaults=True)) == config
