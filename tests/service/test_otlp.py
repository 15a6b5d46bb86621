"""``tierd --otlp``: a collector gets what /metrics has, and each step once; one that is down is told once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import service.cli
from service.metrics import render_runs
from service.status_files import StatusFiles
from service.watch import Watch
from tiering.telemetry import StatusWriter, StepRecord

from .conftest import Publish
from .full_view import DESCRIPTION, FULL, SNAPSHOT
from .processes import tierd, until

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otlp is not installed")

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from service.otlp import push
from service.otlp.data import metrics_data, resource
from service.otlp.push import Push

SECRET = "a-key-of-the-collector"


class Collector(ThreadingHTTPServer):
    """An OTLP receiver. It answers with ``status``, and keeps what it accepted."""

    def __init__(self) -> None:
        self.status = 200
        self.metrics: list[ExportMetricsServiceRequest] = []
        self.spans: list[Any] = []
        self.headers: list[dict[str, str]] = []
        super().__init__(("127.0.0.1", 0), _Receiver)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.headers.append(dict(self.headers.items()))
        self.send_response(self.server.status)
        self.send_header("location", "http://127.0.0.1:1/")
        self.send_header("content-length", str(len(SECRET)))
        self.end_headers()
        self.wfile.write(SECRET.encode() if self.server.status != 200 else b" " * len(SECRET))
        if self.server.status == 200 and self.path == "/v1/metrics":
            self.server.metrics.append(ExportMetricsServiceRequest.FromString(body))
        elif self.server.status == 200:
            request = ExportTraceServiceRequest.FromString(body)
            self.server.spans += request.resource_spans[0].scope_spans[0].spans

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def attributes(of: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in of.attributes}


def samples_of(request: ExportMetricsServiceRequest) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """As Prometheus names them when it receives them."""
    samples = {}
    for metric in request.resource_metrics[0].scope_metrics[0].metrics:
        kind = metric.WhichOneof("data")
        for point in getattr(metric, kind).data_points:
            labels = attributes(point)
            if kind == "histogram":
                samples[f"{metric.name}_count", frozenset(labels.items())] = point.count
                samples[f"{metric.name}_sum", frozenset(labels.items())] = point.sum
                below = 0
                for bound, count in zip((*point.explicit_bounds, "+Inf"), point.bucket_counts, strict=True):
                    below += count
                    name = f"{metric.name}_bucket"
                    samples[name, frozenset({**labels, "le": str(bound)}.items())] = below
            else:
                name = metric.name + ("_total" if kind == "sum" else "")
                samples[name, frozenset(labels.items())] = point.as_double
    return samples


def test_a_collector_gets_what_a_scraper_gets() -> None:
    request = encode_metrics(metrics_data(FULL, resource()))
    scraped = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(render_runs(FULL).decode())
        for sample in family.samples
    }
    assert samples_of(request) == scraped
    metrics = {metric.name: metric for metric in request.resource_metrics[0].scope_metrics[0].metrics}
    steps, seconds = metrics["tiering_steps"], metrics["tiering_recent_step_seconds"]
    assert steps.sum.is_monotonic and steps.sum.aggregation_temporality == 2
    point = steps.sum.data_points[0]
    assert (point.start_time_unix_nano, point.time_unix_nano) == (
        int(SNAPSHOT.started_at * 1e9),
        int(FULL.taken_at * 1e9),
    )
    assert (seconds.unit, metrics["tiering_tier_used_bytes"].unit, steps.unit) == ("s", "By", "")


def test_each_step_is_sent_once_and_its_ranks_share_a_trace(
    collector: Collector, directory: Path, publishing: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"api-key={SECRET}")
    step = StepRecord(7, 2.0, forward=0.5, stall=0.25, read_bytes=9, stalls={"gather": 0.25}, ended_at=1e9)
    snapshot = replace(SNAPSHOT, steps=[step], local_world_size=2)
    writers: list[StatusWriter] = [
        publishing(directory, replace(snapshot, rank=rank), DESCRIPTION) for rank in (0, 1)
    ]
    with Push(Watch(StatusFiles(directory), max_age=0), collector.url, interval=0.02, steps=True):
        until(lambda: len(collector.metrics) > 2)
        writers[0].publish(replace(snapshot, steps=[step, replace(step, step=8, ended_at=1e9 + 2)]))
        until(lambda: len(collector.spans) > 2)
        count = len(collector.metrics)
        until(lambda: len(collector.metrics) > count + 1)
    first, second, third = collector.spans
    assert (first.name, first.start_time_unix_nano, first.end_time_unix_nano) == (
        "step",
        int(1e18) - 2 * 10**9,
        int(1e18),
    )
    told = attributes(first)
    assert (
        told.items() >= {"run": "gpt-1a2b3c4d", "rank": 0, "step": 7, "forward": 0.5, "stall": 0.25}.items()
    )
    assert (told["stall.gather"], told["read_bytes"], attributes(second)["rank"]) == (0.25, 9, 1)
    assert first.trace_id == second.trace_id != third.trace_id
    assert first.span_id != second.span_id
    assert attributes(third)["step"] == 8
    assert {header.get("api-key") for header in collector.headers} == {SECRET}


@pytest.mark.parametrize(
    ("status", "words"),
    [(401, "the HTTP status 401"), (307, "the HTTP status 307"), (0, "the connection failed")],
)
def test_a_collector_that_accepts_nothing_is_told_once(
    status: int,
    words: str,
    collector: Collector,
    directory: Path,
    publishing: Publish,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(push, "TIMEOUT", 0.2)
    caplog.set_level(logging.INFO)
    publishing(directory, SNAPSHOT)
    collector.status = status or 200
    url = collector.url if status else "http://127.0.0.1:1"
    with Push(Watch(StatusFiles(directory)), url, interval=0.02, steps=False) as pushing:
        until(lambda: "does not accept" in caplog.text)
        time.sleep(0.1)  # a few more attempts
        pushing._metrics._endpoint = collector.url + "/v1/metrics"
        collector.status = 200
        if status:
            until(lambda: "accepts metrics again" in caplog.text)
    lines = [record.getMessage() for record in caplog.records if record.name == "service.otlp.push"]
    assert lines[0].startswith(f"the collector at {url} does not accept metrics: ") and words in lines[0]
    assert len(lines) == (2 if status else 1)
    assert SECRET not in caplog.text


def test_the_command_pushes(collector: Collector, directory: Path, publishing: Publish) -> None:
    publishing(directory, SNAPSHOT)
    with tierd(directory, "--otlp", collector.url + "/", "--otlp-interval", "1") as sidecar:
        until(lambda: collector.metrics)
        names = {metric.name for metric in collector.metrics[0].resource_metrics[0].scope_metrics[0].metrics}
        assert "tiering_steps" in names
        assert len(sidecar.states()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--otlp", "collector:4318"], "needs the URL of a collector"),
        (["--otlp", "http://"], "needs the URL of a collector"),
        (["--otlp", "http://me:hunter2@collector"], "no user name or password"),
        (["--otlp", "http://collector", "--otlp-interval", "0"], "between 1 and 3600"),
    ],
)
def test_what_is_no_collector_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        service.cli.options_of(arguments)
    error = capsys.readouterr().err
    assert words in error and "hunter2" not in error


def test_the_extra_is_named_if_it_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "service.otlp.push", None)
    with pytest.raises(SystemExit):
        service.cli.options_of(["--otlp", "http://collector"])
    assert "pip install 'tiering[otlp]'" in capsys.readouterr().err
