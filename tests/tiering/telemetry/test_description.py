"""The description of a status file, and the header fields that later versions may add."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.tiering.telemetry.status_files import describing, only_reading, snapshot
from tiering.telemetry import (
    Description,
    SettingStatus,
    StatusFile,
    StatusWriter,
    find_status_files,
    job_labels,
)
from tiering.telemetry import status_file as status_module


def test_a_description_comes_with_every_snapshot_and_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptions = [describing(("file", "é"), ("default", str(rank))) for rank in range(70)]
    parse, readings = Mock(wraps=Description.from_json), None
    monkeypatch.setattr(status_module.Description, "from_json", parse)
    writers = [
        StatusWriter("gpt", rank, 70, tmp_path, description) for rank, description in enumerate(descriptions)
    ]
    for step in (1, 2):
        for writer in writers:
            writer.publish(snapshot(step))
        readings = [file.read() for file in find_status_files(tmp_path)]
        assert [(reading.state, reading.description, reading.snapshot) for reading in readings] == [
            ("live", description, snapshot(step)) for description in descriptions
        ]
    assert parse.call_count == len(descriptions)
    del readings
    file = StatusFile(writers[0].path, "gpt", 0)
    assert (file.read().description, parse.call_count) == (descriptions[0], len(descriptions) + 1), (
        "unused descriptions are dropped"
    )
    for writer in writers:
        writer.close()


def test_labels_name_the_job_the_pod_and_what_is_configured(tmp_path: Path) -> None:
    slurm = {"SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "gpt", "HOSTNAME": "node-1"}
    assert job_labels({"team": "vision", "job_name": "mine"}, slurm) == {
        "job_id": "77",
        "job_name": "mine",
        "team": "vision",
    }
    namespace = tmp_path / "namespace"
    namespace.write_text("ml\n")
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "gpt-0"}
    assert job_labels({}, pod, namespace) == {"namespace": "ml", "pod": "gpt-0"}
    downward = pod | {"POD_NAME": "p" * 200, "POD_NAMESPACE": "prod"}
    assert job_labels({}, downward, namespace) == {"namespace": "prod", "pod": "p" * 128}
    assert job_labels({}, {}) == {}


def test_a_damaged_description_is_none(tmp_path: Path) -> None:
    at = 64 + status_module.CAPACITY + 20
    with closing(StatusWriter("gpt", directory=tmp_path, description=describing(("file", "é")))) as writer:
        writer.publish(snapshot(stalls={"x" * 60_000: 1.0}))
        with writer.path.open("r+b") as file:
            (byte,) = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([byte ^ 1]), at)
        reading = only_reading(tmp_path)
        assert (reading.state, reading.description, reading.snapshot is None) == ("live", None, False)
        os.truncate(writer.path, at)
        assert only_reading(tmp_path).description is None
    with closing(StatusWriter("gpt", directory=tmp_path)) as writer:
        writer.publish(snapshot())
        assert only_reading(tmp_path).description is None


def test_a_description_too_large_loses_what_is_least_missed(tmp_path: Path) -> None:
    whole = describing(("file", "a" * 300), ("default", "b" * 300), ("auto", "c" * 300))
    assert whole.configuration is not None
    from_file, default, auto = whole.configuration.settings
    fewer: list[list[SettingStatus]] = [
        [from_file, default, auto],
        [from_file, replace(default, note=""), auto],
        [from_file, auto],
        [],
    ]
    for settings in fewer:
        fitted = replace(whole, configuration=replace(whole.configuration, settings=settings))
        size = len(fitted.to_json())
        assert Description.from_json(whole.fitted(size)) == fitted
    assert Description.from_json(whole.fitted(size - 1)) == replace(whole, configuration=None)
    huge = describing(("default", "b" * status_module.LARGEST_DESCRIPTION), ("file", "a"))
    with closing(StatusWriter("gpt", directory=tmp_path, description=huge)) as writer:
        writer.publish(snapshot())
        description = only_reading(tmp_path).description
        assert description is not None and description.configuration is not None
        assert [setting.note for setting in description.configuration.settings] == ["", "a"]


def test_headers_of_later_minor_versions_are_read(tmp_path: Path) -> None:
    description = describing(("file", "n"))
    with closing(StatusWriter("gpt", directory=tmp_path, description=description)) as writer:
        writer.publish(snapshot())
        raw = writer.path.read_bytes()
        header = bytearray(raw[:64].ljust(120, b"?"))
        header[12:16] = (120).to_bytes(4, "little")
        writer.path.write_bytes(bytes(header) + raw[64:])
        reading = only_reading(tmp_path)
        assert (reading.state, reading.snapshot, reading.description) == ("live", snapshot(), description)
