"""/metrics: both forms can be read back, lint-free, and say of a View what is in it."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from service.app import create_app
from service.metrics import OPENMETRICS, TEXT, render
from service.metrics.monitoring_files import table
from service.metrics.rank_metrics import PLAN_METRICS, RANK_METRICS, RANK_UP, SNAPSHOT_METRICS
from service.metrics.run_metrics import RUN_ENDED, RUN_METRICS
from service.metrics.sidecar_metrics import SIDECAR_METRICS, Scrape
from service.status_files import StatusFiles
from service.view import RankView, RunView, View
from service.watch import Watch
from tiering._version import __version__
from tiering.telemetry import (
    RESERVED_LABELS,
    DirectionStatus,
    PathStatus,
    PlannedTier,
    PlanStatus,
    Snapshot,
    StepRecord,
    TierStatus,
)

from .conftest import Publish
from .full_view import DESCRIPTION, FIRST, FULL, MIB, SNAPSHOT
from .processes import Training, until
from .promtool import promtool

ACCEPT_OPENMETRICS = "application/openmetrics-text; version=1.0.0"
DOCS = Path(__file__).parents[2] / "docs" / "tools" / "metrics.md"

# The labels of the run of FULL, of its rank 0, and of that rank's host tier and swap path.
RUN = {"run": "gpt-1a2b3c4d"}
RANK = {**RUN, "rank": "0"}
HOST, READ = {**RANK, "tier": "host"}, {**RANK, "path": "/nvme/swap", "direction": "read"}
WRITE, PATH = READ | {"direction": "write"}, {**RANK, "path": "/nvme/swap"}
EXPECTED: list[tuple[str, dict[str, str], float]] = [
    ("tiering_build_info", {"version": __version__}, 1),
    ("tiering_sidecar_last_reading_timestamp_seconds", {}, 1_700_000_804),
    ("tiering_sidecar_readings_total", {}, 7),
    ("tiering_sidecar_subscribers", {}, 0),
    ("tiering_runs_ended_total", {"how": "failed"}, 0),
    ("tiering_run_ended", {"run": "old-1", "how": "preempted", "code": "SIGTERM", "rank": ""}, 1),
    ("tiering_sidecar_pages", {"state": "silent"}, 1),
    ("tiering_sidecar_pages", {"state": "torn"}, 0),
    ("tiering_node_up", {"node": "node7:8471"}, 1),
    (
        "tiering_run_info",
        {
            **RUN,
            "name": "gpt 25M",
            "user": "train",
            "torch_version": "2.13.0",
            "world_size": "4",
            "job_id": "77",
            "team": "vision",
        },
        1,
    ),
    ("tiering_run_ranks_expected", RUN, 2),
    ("tiering_run_ranks_up", RUN, 1),
    ("tiering_run_config_keys", {**RUN, "cause": "without effect"}, 2),
    ("tiering_run_config_keys", {**RUN, "cause": "deprecated"}, 1),
    ("tiering_rank_up", RANK, 1),
    ("tiering_rank_up", {**RUN, "rank": "1"}, 1),
    ("tiering_rank_heartbeat_age_seconds", {**RUN, "rank": "1"}, 14),
    (
        "tiering_rank_info",
        {**RANK, "device": "cuda:0 NVIDIA H200", "io_flags": "registered_buffers,verify", "mesh": ""},
        1,
    ),
    ("tiering_rank_start_time_seconds", RANK, 1_700_000_000.5),
    ("tiering_steps_total", RANK, 12),
    ("tiering_global_step", RANK, 112),
    ("tiering_samples_total", RANK, 96),
    ("tiering_tokens_total", RANK, 9600),
    ("tiering_model_flops_total", RANK, 9.6e12),
    ("tiering_device_peak_flops", RANK, 8e11),
    ("tiering_gpu_utilization_ratio", RANK, 0.75),
    ("tiering_drive_endurance_used_ratio", PATH, 0.25),
    ("tiering_drive_written_bytes_total", PATH, 1e14),
    ("tiering_drive_endurance_bytes", PATH, 4e14),
    ("tiering_gpu_power_watts", RANK, 350.5),
    ("tiering_gpu_temperature_celsius", RANK, 61),
    ("tiering_skipped_steps_total", RANK, 1),
    ("tiering_global_skipped_steps", RANK, 5),
    ("tiering_loss", RANK, 3.5),
    ("tiering_gradient_norm", RANK, 0.75),
    ("tiering_learning_rate", RANK, 1e-3),
    ("tiering_loss_scale", RANK, 65536),
    ("tiering_phase_seconds_total", {**RANK, "phase": "backward"}, 6),
    ("tiering_stall_seconds_total", {**RANK, "phase": "backward", "cause": "copies of parameters"}, 0.75),
    ("tiering_recent_step_seconds", RANK, 2),
    ("tiering_recent_stall_ratio", RANK, 0.125),
    ("tiering_last_step_timestamp_seconds", RANK, 1_700_000_803),
    ("tiering_tier_capacity_bytes", HOST, 4096 * MIB),
    ("tiering_tier_available_bytes", HOST, 2048 * MIB),
    ("tiering_tier_budget_bytes", HOST, 96 * MIB),
    ("tiering_tier_used_bytes", HOST, 60 * MIB),
    ("tiering_tier_peak_bytes", HOST, 90 * MIB),
    ("tiering_tier_content_bytes", {**HOST, "kind": "gradients"}, 48 * MIB),
    ("tiering_tier_content_bytes", {**HOST, "kind": "activations"}, 12 * MIB),
    ("tiering_activation_bytes", RANK, 3 * MIB),
    ("tiering_activation_peak_bytes", RANK, 7 * MIB),
    ("tiering_activation_moved_bytes_total", RANK, 60 * MIB),
    ("tiering_activation_swapped_bytes_total", {**RANK, "direction": "read"}, 40 * MIB),
    ("tiering_activation_swapped_bytes_total", {**RANK, "direction": "write"}, 44 * MIB),
    ("tiering_device_memory_allocated_bytes", RANK, 70 * MIB),
    ("tiering_device_memory_peak_bytes", RANK, 95 * MIB),
    ("tiering_device_memory_reserved_bytes", RANK, 128 * MIB),
    ("tiering_swap_path_info", {**PATH, "io_engine": "io_uring", "direct": "true"}, 1),
    ("tiering_swap_bytes_total", READ, 500 * MIB),
    ("tiering_swap_bytes_total", WRITE, 400 * MIB),
    ("tiering_swap_operations_total", READ, 400),
    ("tiering_swap_retries_total", READ, 2),
    ("tiering_swap_rereads_total", READ, 1),
    ("tiering_swap_errors_total", READ, 0),
    ("tiering_swap_errors_total", WRITE, 3),
    ("tiering_swap_errors_by_errno_total", {**WRITE, "errno": "EIO"}, 2),
    ("tiering_swap_operations_in_flight", READ, 3),
    ("tiering_swap_busy_seconds_total", READ, 0.5),
    ("tiering_swap_queue_full_seconds_total", PATH, 0.3),
    ("tiering_swap_path_measured_bytes_per_second", PATH, 10**9),
    ("tiering_swap_path_recent_bytes_per_second", PATH, 4 * 10**8),
    ("tiering_swap_path_share", PATH, 0.45),
    ("tiering_io_registered_bytes", RANK, 8 * MIB),
    ("tiering_device_copy_bytes_total", {**RANK, "direction": "h2d"}, 900 * MIB),
    ("tiering_device_copy_bytes_total", {**RANK, "direction": "d2h"}, 300 * MIB),
    ("tiering_device_link_measured_bytes_per_second", RANK, 5 * 10**10),
    ("tiering_device_copies_total", {**RANK, "direction": "h2d"}, 60),
    ("tiering_device_copy_busy_seconds_total", {**RANK, "direction": "d2h"}, 0.03125),
    ("tiering_collective_calls_total", {**RANK, "kind": "all-gather"}, 40),
    ("tiering_collective_sent_bytes_total", {**RANK, "kind": "all-gather"}, 80 * MIB),
    ("tiering_checkpoints_total", {**RANK, "outcome": "saved"}, 2),
    ("tiering_checkpoints_total", {**RANK, "outcome": "failed"}, 1),
    ("tiering_checkpoint_under_way", RANK, 1),
    ("tiering_checkpoint_last_timestamp_seconds", RANK, 1_700_000_700),
    ("tiering_checkpoint_last_duration_seconds", RANK, 4),
    ("tiering_checkpoint_last_stall_seconds", RANK, 0.5),
    ("tiering_checkpoint_last_bytes", RANK, 300 * MIB),
    ("tiering_plan_tier_bytes", {**HOST, "kind": "staging"}, 10 * MIB),
    ("tiering_plan_step_bytes", {**RANK, "direction": "read", "kind": "optimizer state"}, 40 * MIB),
    ("tiering_plan_step_bytes", {**RANK, "direction": "write", "kind": "optimizer state"}, 30 * MIB),
    ("tiering_plan_step_bytes", {**RANK, "direction": "send", "kind": "gradients"}, 20 * MIB),
]

Series = dict[tuple[str, tuple[tuple[str, str], ...]], str]


def series(families: Iterable[Metric]) -> Series:
    """Values, spelled out so that NaN is itself, by name and labels; none of them twice."""
    values: Series = {}
    for family in families:
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in values
            values[key] = repr(float(sample.value))
    return values


def both(view: View) -> Series:
    """What the two forms say, which is the same."""
    text, openmetrics = render(Scrape(view))[0].decode(), render(Scrape(view), ACCEPT_OPENMETRICS)[0].decode()
    assert openmetrics.endswith("# EOF\n")

    def of_training(samples: Series) -> Series:  # the sidecar's own CPU time moves on
        return {key: value for key, value in samples.items() if not key[0].startswith("process_")}

    samples = of_training(series(parse_text(text)))
    assert samples == of_training(series(parse_openmetrics(openmetrics)))
    return samples


def of(samples: Series, name: str, /, **labels: str) -> float:
    """The value of the one series of that name that has these labels among its own."""
    (value,) = (
        value for (key, has), value in samples.items() if key == name and labels.items() <= dict(has).items()
    )
    return float(value)


def names(samples: Series) -> set[str]:
    return {name for name, _ in samples}


def test_a_full_view_fills_every_family_and_passes_the_linter() -> None:
    text = render(Scrape(FULL))[0].decode()
    metrics = {family.name: family for family in parse_text(text)}
    for families, subject in (
        (SIDECAR_METRICS, ()),
        ((*RUN_METRICS, RUN_ENDED), ("run",)),
        ((RANK_UP, *RANK_METRICS, *SNAPSHOT_METRICS, *PLAN_METRICS), ("run", "rank")),
    ):
        for family in families:
            metric = metrics[family.name.removesuffix("_total")]
            assert metric.samples, family.name
            assert metric.type == ("gauge" if family.kind == "info" else family.kind)
            assert set(metric.samples[0].labels) - {"le", "job_id", "team"} == {*subject, *family.labels}
            assert family.help.endswith(".")
    assert "process_resident_memory_bytes" in metrics  # of the sidecar
    promtool("check", "metrics", stdin=text)


def test_the_values_are_those_of_the_page() -> None:
    samples = both(FULL)
    for name, labels, value in EXPECTED:
        assert of(samples, name, **labels) == value, name
    latency = {f"tiering_swap_latency_seconds_{part}" for part in ("bucket", "count", "sum")}
    advised = {"tiering_run_warnings"}  # which they are is the advice's to say
    assert names(samples) == {name for name, _, _ in EXPECTED} | latency | advised
    values = series(parse_text(render(Scrape(FULL, 3, {"died": 2}))[0].decode()))
    assert of(values, "tiering_sidecar_subscribers") == 3
    assert of(values, "tiering_runs_ended_total", how="died") == 2


def test_latencies_are_cumulative_and_nothing_falls_outside() -> None:
    """300 in [2^18, 2^19) ns and 100 in [2^19, 2^20); then 5 below the first bound, and 7 above the last."""
    samples = both(FULL)

    def below(direction: str, seconds: str) -> float:
        return of(samples, "tiering_swap_latency_seconds_bucket", rank="0", direction=direction, le=seconds)

    assert [below("read", le) for le in ("0.000262144", "0.000524288", "0.001048576", "+Inf")] == [
        0,
        300,
        400,
        400,
    ]
    assert [below("write", le) for le in ("1.6384e-05", "8.589934592", "+Inf")] == [5, 5, 12]
    for direction, count, total in (("read", 400, 0.25), ("write", 12, 0)):
        labels = {"rank": "0", "direction": direction}
        assert of(samples, "tiering_swap_latency_seconds_count", **labels) == count
        assert of(samples, "tiering_swap_latency_seconds_sum", **labels) == total


def test_of_a_dead_rank_only_that_it_is_down_is_told() -> None:
    dead = replace(FIRST, rank=1, state="stale", reason="the writer is gone")
    samples = both(View(5.0, (RunView("gpt", "gpt", (FIRST, dead)),)))
    assert {name for name, labels in samples if ("rank", "1") in labels} == {"tiering_rank_up"}
    assert of(samples, "tiering_rank_up", rank="1") == 0
    assert "tiering_run_ended" not in names(samples)
    last_samples = both(View(5.0, (RunView("gpt", "gpt", (dead,)),)))
    of_the_run = {name for name, labels in last_samples if ("run", "gpt") in labels}
    assert of_the_run == {"tiering_rank_up", "tiering_run_ended"}


def test_a_page_that_cannot_be_read_is_no_rank_that_is_gone() -> None:
    """Somebody is called at night for those. Of a run with no other pages, that much is told."""
    unreadable = RankView(0, "newer-version", "of version 9", None)
    samples = both(View(5.0, (RunView("gpt", "gpt", (unreadable,)),)))
    assert of(samples, "tiering_rank_up") == 1
    assert of(samples, "tiering_run_warnings", code="rank-newer-version") == 1
    assert (of(samples, "tiering_run_ranks_up"), of(samples, "tiering_run_ranks_expected")) == (0, 1)


def test_of_pages_of_one_rank_the_living_one_counts() -> None:
    """A series twice would cost all others the scrape."""
    stale = replace(FIRST, state="stale", snapshot=replace(SNAPSHOT, step=99, started_at=9e9))
    unreadable = RankView(0, "unreadable", "truncated", None)
    for ranks in ((stale, FIRST, unreadable), (unreadable, FIRST, stale)):
        samples = both(View(5.0, (RunView("gpt", "gpt", ranks),)))
        assert (of(samples, "tiering_rank_up"), of(samples, "tiering_steps_total")) == (1, 12)
        assert of(samples, "tiering_run_ranks_up") == 1


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        (None, TEXT),
        ("*/*", TEXT),
        ("text/html,application/xhtml+xml,*/*;q=0.8", TEXT),
        ("application/openmetrics-text", OPENMETRICS),
        (  # Prometheus 3
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;q=0.3,*/*;q=0.2",
            OPENMETRICS,
        ),
        ("text/plain, application/openmetrics-text; q=0.5", TEXT),
        ("application/openmetrics-text;q=0", TEXT),
        ("application/openmetrics-text;q=1e9;version=../..\xff", TEXT),
    ],
)
def test_the_form_is_the_one_that_is_asked_for(accept: str | None, content_type: str) -> None:
    body, header = render(Scrape(FULL), accept)
    assert header == content_type
    assert body.endswith(b"# EOF\n") == (header == OPENMETRICS)


@pytest.mark.parametrize(
    ("header", "zipped"),
    [
        ("gzip", True),
        ("deflate, GZIP;q=0.5", True),
        ("gzip;q=0", False),
        ("", False),
        ("br, identity", False),
    ],
)
def test_a_client_that_takes_gzip_gets_it(
    header: str, zipped: bool, directory: Path, publishing: Publish
) -> None:
    with TestClient(create_app(Watch(StatusFiles(directory))), base_url="http://localhost") as client:
        answer = client.get("/metrics", headers={"accept-encoding": header})
        small = client.get("/v1/status", headers={"accept-encoding": header})
        publishing(directory, SNAPSHOT)
        until(lambda: client.get("/v1/status").json()["runs"])
        status = client.get("/v1/status", headers={"accept-encoding": header})
    assert (answer.headers.get("content-encoding") == "gzip") is zipped
    assert answer.headers["vary"] == "accept, accept-encoding"
    # The client has unpacked it.
    assert answer.text.startswith("# HELP tiering_build_info ")
    assert "content-encoding" not in small.headers and small.json()["runs"] == []
    assert (status.headers.get("content-encoding") == "gzip") is zipped
    assert status.headers["vary"] == "accept-encoding" and len(status.json()["runs"]) == 1
    assert (int(status.headers["content-length"]) < len(status.content)) is zipped


numbers = st.floats() | st.integers(-1, 1 << 62)
words = st.sampled_from(['a "b"\\', "c\nd\\n", "e\0\udc80", "f, g=h}", ""]) | st.text(max_size=6)
by_word = st.dictionaries(words, numbers, max_size=2)
directions = st.builds(
    DirectionStatus,
    *(numbers,) * 6,
    errors_by_errno=by_word,
    latency_buckets=st.lists(st.integers(0, 1 << 50), max_size=64),
    latency_seconds=numbers,
)
snapshots = st.builds(
    Snapshot,
    *(words, st.just(0), st.just(1), st.just(1), numbers),
    step=numbers,
    loss=st.none() | numbers,
    learning_rate=st.none() | numbers,
    phase_seconds=by_word,
    tiers=st.lists(st.builds(TierStatus, words, *(numbers,) * 4, by_word, st.none() | numbers), max_size=2),
    io=st.lists(st.builds(PathStatus, words, words, st.booleans(), directions, directions), max_size=2),
    stalls_by_phase=st.dictionaries(words, by_word, max_size=2),
    steps=st.lists(st.builds(StepRecord, st.just(1), numbers, stall=numbers), max_size=2),
)
planned = st.builds(
    PlanStatus, st.lists(st.builds(PlannedTier, words, st.just(1), st.just(1), by_word), max_size=2)
)
ranks = st.builds(
    RankView,
    st.integers(-1, 2),
    st.sampled_from(["live", "silent", "stale", "torn"]),
    words,
    st.none() | numbers,
    st.none() | snapshots,
    st.none() | st.builds(lambda plan: replace(DESCRIPTION, plan=plan), planned),
)
views = st.builds(
    View,
    numbers,
    st.lists(st.builds(RunView, words, words, st.lists(ranks, max_size=3).map(tuple)), max_size=2),
)


@settings(max_examples=40, deadline=None)
@given(views)
def test_whatever_a_view_holds_both_forms_can_be_read_back(view: View) -> None:
    samples = both(view)
    counters = [float(value) for (name, _), value in samples.items() if name.endswith("_total")]
    assert all(math.isfinite(value) and value >= 0 for value in counters)
    totals = {float(value) for (name, labels), value in samples.items() if name == "tiering_steps_total"}
    steps = {
        float(rank.snapshot.step) for run in view.runs for rank in run.ranks if rank.snapshot is not None
    }
    assert totals <= steps


def test_counters_of_a_training_engine_only_rise(training: Training) -> None:
    with TestClient(
        create_app(Watch(StatusFiles(training.directory))), base_url="http://localhost"
    ) as client:

        def ask(accept: str) -> str:
            answer = client.get("/metrics", headers={"accept": accept})
            assert (answer.status_code, answer.headers["content-type"]) == (
                200,
                render(Scrape(FULL), accept)[1],
            )
            return answer.text

        first = ask("text/plain")
        promtool("check", "metrics", stdin=first)
        before = series(parse_text(first))
        until_step = of(before, "tiering_steps_total") + 1
        end = time.monotonic() + 30
        while True:
            after = series(parse_openmetrics(ask(ACCEPT_OPENMETRICS)))
            if of(after, "tiering_steps_total") >= until_step:
                break
            assert time.monotonic() < end, "no step in time"
            time.sleep(0.05)
    cumulative = re.compile(r"_(total|count|sum|bucket)$")
    risen = 0
    for key, value in before.items():
        if cumulative.search(key[0]):
            assert float(after[key]) >= float(value), key
            risen += float(after[key]) > float(value)
    assert risen > 10
    assert of(after, "tiering_swap_bytes_total", direction="write") > of(
        before, "tiering_swap_bytes_total", direction="write"
    )
    assert of(after, "tiering_tier_used_bytes", tier="nvme") > 0


def test_no_label_of_a_configuration_hides_one_of_the_sidecar() -> None:
    (info,) = (family for family in RUN_METRICS if family.name == "tiering_run_info")
    assert {"run", *info.labels} == RESERVED_LABELS


def test_the_documented_table_is_the_one_of_the_code() -> None:
    """tierd metrics prints it anew."""
    assert table() in DOCS.read_text(encoding="utf-8")
