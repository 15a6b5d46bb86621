"""What programs read: CSV, Prometheus's text, and JSON with its schema."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tiering.tierbench.display import exports
from tiering.tierbench.result import SCHEMA_VERSION, Result

from . import results

GOLDEN = Path(__file__).parent / "result_v1.json"
ODD = 'C:\\tmp\\"a", b\nc'
ODD_NAMED = results.result(
    targets=(results.target(ODD, results.on(results.nvme(), ODD)),),
    rows=(results.row("read", read=1e9, directories=(ODD,)),),
)


def lines_of(result: Result) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(exports.as_csv(result), newline="")))


def test_csv_has_each_window_as_a_whole_and_by_directory() -> None:
    lines = lines_of(results.TWO)
    windows = ["sustained", "read", "write", "rw"]
    assert [(line["rw"], line["directory"]) for line in lines] == [
        (rw, directory) for rw in windows for directory in ("total", *results.PATHS)
    ]
    for row, (total, *parts) in zip(results.TWO.rows, zip(*[iter(lines)] * 3, strict=True), strict=True):
        for name in ("read_bytes_per_second", "write_bytes_per_second", "read_iops", "write_iops"):
            assert float(total[name]) == pytest.approx(sum(float(part[name]) for part in parts))
        assert float(total["read_bytes_per_second"]) * row.seconds == pytest.approx(row.read.bytes)
        assert float(total["write_iops"]) * row.seconds == pytest.approx(row.write.ops)
        assert float(total["cpu_seconds"]) == row.cpu_seconds and not parts[0]["cpu_seconds"]
        assert (row.read.latency is None) == (total["read_p999_seconds"] == "")
    assert {line["schema_version"] for line in lines} == {str(SCHEMA_VERSION)}
    assert lines[1]["device"] == "md0" and lines[1]["bs"] == "1048576"
    assert next(iter(lines[0])) == "schema_version"


def test_csv_is_quoted_and_has_its_names_where_nothing_was_measured() -> None:
    assert lines_of(ODD_NAMED)[1]["directory"] == ODD
    assert exports.as_csv(results.BARE) == ",".join(exports.COLUMNS) + "\r\n"


def series(result: Result) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """By name and labels, none of which is there twice."""
    families = list(text_string_to_metric_families(exports.as_prom(result)))
    assert all(family.name.startswith("tierbench_") and family.documentation for family in families)
    samples = [sample for family in families for sample in family.samples]
    values = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(values) == len(samples)
    return values


def test_prometheus_is_told_of_each_directory() -> None:
    values = series(results.TWO)
    row = results.TWO.rows[3]
    where = {"directory": "/mnt/nvme1/swap", "device": "nvme1n1", "rw": "rw", "direction": "write"}
    latency = row.paths[1].write.latency
    assert latency is not None
    assert values["tierbench_bytes_per_second", frozenset(where.items())] == (
        row.paths[1].write.bytes / row.seconds
    )
    for quantile, value in (("0.5", latency.p50), ("0.999", latency.p999), ("1", latency.max)):
        assert (
            values["tierbench_latency_seconds", frozenset((where | {"quantile": quantile}).items())] == value
        )
    run = ("directory", ",".join(results.PATHS))
    assert values["tierbench_timestamp_seconds", frozenset([run])] == 1_795_354_620
    assert values["tierbench_write_cache_bytes", frozenset([run])] == 20e9
    assert (
        values["tierbench_cpu_seconds", frozenset([run, ("rw", "sustained")])]
        == results.TWO.rows[0].cpu_seconds
    )
    about = next(dict(labels) for name, labels in values if name == "tierbench_info")
    assert about["schema_version"] == str(SCHEMA_VERSION) and about["iodepth"] == "16"


def test_prometheus_gets_names_back_as_they_were() -> None:
    assert {dict(labels)["directory"] for _, labels in series(ODD_NAMED)} == {ODD}


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: package prometheus)"
)
def test_promtool_has_nothing_to_say() -> None:
    for result in (*results.ALL, ODD_NAMED):
        process = subprocess.run(
            ["promtool", "check", "metrics"], input=exports.as_prom(result), capture_output=True, text=True
        )
        assert (process.returncode, process.stdout, process.stderr) == (0, "", "")


@pytest.mark.parametrize("result", results.ALL)
def test_json_is_as_its_schema_says_and_comes_back(result: Result, tmp_path: Path) -> None:
    schema = Result.model_json_schema(mode="serialization")
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(result.to_json()), schema)
    path = tmp_path / "result.json"
    path.write_text(result.to_json())
    assert Result.load(path) == result


def within(part: Any, whole: Any) -> bool:
    """Whether ``whole`` has all that ``part`` has, and as it is there."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(
            name in whole and within(each, whole[name]) for name, each in part.items()
        )
    if isinstance(part, list):
        return (
            isinstance(whole, list)
            and len(part) == len(whole)
            and all(within(*both) for both in zip(part, whole, strict=True))
        )
    return bool(part == whole)


def test_a_result_of_the_first_version_is_still_one() -> None:
    """A name that goes, or means something else, needs another number of the schema; one that comes does not."""
    assert within(json.loads(GOLDEN.read_text()), json.loads(Result.load(GOLDEN).to_json()))
