"""Sends metrics, and steps as spans, to an OpenTelemetry collector, in a thread of its own.

Nothing waits for it. It keeps no queue: what a collector misses while it does not answer is replaced by newer values,
because all counters are cumulative.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self
from urllib.parse import urlsplit

import requests
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import MetricExportResult
from opentelemetry.sdk.trace.export import SpanExportResult

from service.formatting import plain
from service.otlp.data import Steps, metrics_data, resource
from service.watch import Watch
from tiering.telemetry import TelemetryError

MAX_SPANS = 16 << 10  # of one request: the last 32 steps of 512 ranks
TIMEOUT = 10.0  # seconds for a request and its retries

log = logging.getLogger(__name__)


# requests has no types: for mypy, its classes are Any.
class _Session(requests.Session):  # type: ignore[misc]
    """A connection that remembers why the last request failed. The collector's own text is not kept: it may have a key.

    Redirects are not followed: their target would get the headers.
    """

    problem = ""

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        try:
            response = super().send(request, **(options | {"allow_redirects": False}))
        except requests.Timeout:
            self.problem = f"it has not answered within {TIMEOUT:g} s"
            raise
        except requests.RequestException as error:
            self.problem = f"the connection failed ({type(error).__name__})"
            raise
        status = response.status_code
        self.problem = "" if status < 300 else f"it answered with the HTTP status {status}"
        if 300 <= status < 400:
            # The exporter takes a redirect for a success.
            response.status_code = 400
        return response


class Push:
    """Sends the View of ``watch`` to the collector at ``url`` every ``interval`` seconds; ``steps``: also new steps.

    Headers, certificates and compression are those of the environment (``OTEL_EXPORTER_OTLP_HEADERS``, ...). Leaving
    the context manager ends the thread after at most one request.
    """

    def __init__(self, watch: Watch, url: str, *, interval: float, steps: bool) -> None:
        self._watch, self._url, self._interval = watch, url.rstrip("/"), interval
        self._origin = resource()
        self._steps = Steps() if steps else None
        self._lost: dict[str, bool] = {}
        self._closing = threading.Event()
        # The exporters log each failure, with the text of the collector.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        self._sessions = {kind: _Session() for kind in ("metrics", "traces")}
        options = {"timeout": TIMEOUT}
        self._metrics = OTLPMetricExporter(
            f"{self._url}/v1/metrics", session=self._sessions["metrics"], **options
        )
        self._spans = OTLPSpanExporter(f"{self._url}/v1/traces", session=self._sessions["traces"], **options)
        self._thread = threading.Thread(target=self._run, name="tierd-otlp", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        # Ends the pause between two attempts.
        self._metrics.shutdown()
        self._spans.shutdown()

    def _run(self) -> None:
        due = time.monotonic()
        while not self._closing.wait(max(0.0, due - time.monotonic())):
            due = max(due + self._interval, time.monotonic())
            try:
                # /healthz reports that nothing can be read.
                with suppress(TelemetryError):
                    self._send()
            except Exception:
                log.exception("the metrics could not be sent")

    def _send(self) -> None:
        view = self._watch.view()
        data = metrics_data(view, self._origin)
        self._exported("metrics", lambda: self._metrics.export(data) is MetricExportResult.SUCCESS)
        if self._steps is not None and not self._closing.is_set():
            spans, last = self._steps.new(view, self._origin, MAX_SPANS)
            if spans and self._exported(
                "traces", lambda: self._spans.export(spans) is SpanExportResult.SUCCESS
            ):
                self._steps.sent(last)

    def _exported(self, kind: str, export: Callable[[], bool]) -> bool:
        """Whether the export succeeds. Logs if the collector stops accepting this ``kind`` of data, or resumes."""
        is_sent = export()
        if self._closing.is_set() or is_sent != self._lost.get(kind, False):
            return is_sent
        self._lost[kind] = not is_sent
        if is_sent:
            log.info("the collector at %s accepts %s again", plain(self._url), kind)
        else:
            reason = self._sessions[kind].problem or "the request is too large"
            log.warning("the collector at %s does not accept %s: %s", plain(self._url), kind, reason)
        return is_sent


def url_problem(url: str) -> str:
    """Why ``url`` is not that of a collector, else ""."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment:
        return "--otlp needs the URL of a collector, for example http://localhost:4318"
    if parts.username is not None:
        return "--otlp takes no user name or password: set OTEL_EXPORTER_OTLP_HEADERS"
    return ""
