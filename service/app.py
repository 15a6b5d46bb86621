"""The HTTP application: its routes. Each response is made from the current View."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel

from service.background import BackgroundRenderer
from service.ended_runs import EndedRuns
from service.events import Events, Subscription
from service.health import Alive, Health, Identity, Readiness, ready
from service.history import INTERVAL, History
from service.http.compression import LEVEL, Body, JsonResponse, accepts_gzip
from service.http.guard import REFUSALS, Access, Detail, Guard
from service.http.parameters import known_parameters
from service.metrics import OPENMETRICS, TEXT, prefers_openmetrics, render
from service.metrics.sidecar_metrics import Scrape
from service.responses.by_rank import (
    ByRank,
    RankBandwidth,
    RankConfig,
    RankCurve,
    RankSteps,
    RankTiers,
    bandwidth,
    config,
    curve,
    steps,
    tiers,
)
from service.responses.examples import with_examples
from service.responses.history import Histories, history
from service.responses.plan import RankPlan, plan
from service.responses.readings import Readings, readings
from service.responses.status import Runs, RunStatus, Status, only, runs, status
from service.run_log import RunLog
from service.view import NotHereError, View
from service.view_cache import ViewCache
from service.watch import Watch
from service.web_page import File, read_files
from tiering.telemetry import TelemetryError, as_text

Run = Annotated[str | None, Query(description="only the run with this id", max_length=200)]
Rank = Annotated[int | None, Query(description="only this rank", ge=0, le=1 << 31)]
Interval = Annotated[float, Query(description="minimum seconds between events", ge=0.25, le=60)]

INVALID: dict[int | str, dict[str, Any]] = {
    422: {"model": Detail, "description": "A parameter is unknown or has an invalid value"},
}
NOT_FOUND_OR_INVALID: dict[int | str, dict[str, Any]] = {
    404: {"model": Detail, "description": "The run or the rank has no status file on this node"},
    **INVALID,
}

Endpoint = Callable[..., Awaitable[Response]]
RANK_ENDPOINTS: dict[str, tuple[object, Callable[[View, str | None, int | None], BaseModel], str]] = {
    "tiers": (ByRank[RankTiers], tiers, "Used bytes, budget and peak of each tier."),
    "bandwidth": (
        ByRank[RankBandwidth],
        bandwidth,
        "Rates of swap paths, the device link and collectives: current, average and peak; latencies of swap paths.",
    ),
    "curve": (
        ByRank[RankCurve],
        curve,
        "Loss, gradient norm, duration and tokens of the steps since the start, in at most 256 points.",
    ),
    "steps": (ByRank[RankSteps], steps, "The recent steps and how their time was spent."),
    "config": (
        ByRank[RankConfig],
        config,
        "The configuration in effect, with the origin of each value.",
    ),
    "plan": (ByRank[RankPlan], plan, "The plan, compared with the measured values."),
}


class Responses:
    """Response bodies, each made once per View, and the records of earlier Views that some responses need."""

    def __init__(self, cache: ViewCache, ended_runs: EndedRuns) -> None:
        self.history, self.run_log = History(), RunLog(ended_runs)
        self._cache = cache

    def status(self, view: View) -> Status:
        """The status of all runs; several responses are parts of it."""
        return self._cache.get(view, "all runs", lambda: status(view, self.history.latest))

    def body(self, view: View, key: Hashable, make: Callable[[], BaseModel]) -> Body:
        """The JSON of the model that ``make`` returns; it is cached under ``key`` for this View."""
        return self._cache.get(view, key, lambda: Body(make().model_dump_json().encode()))

    def status_body(self, view: View, run: str | None) -> Body:
        """The body of /v1/status; /v1/events sends the same bytes."""
        return self.body(view, ("status", run), lambda: only(self.status(view), run))

    def json(self, view: View, key: Hashable, make: Callable[[], BaseModel]) -> Response:
        """The response with ``body()``."""
        return JsonResponse(self.body(view, key, make))


def create_app(watch: Watch, *, expect_ranks: int | None = None, access: Access | None = None) -> FastAPI:
    """The sidecar for the ranks that ``watch`` reads.

    /readyz requires ``expect_ranks`` ranks that publish. ``access`` restricts the clients (default: any client that
    addresses the sidecar as localhost or by an IP address).
    """
    cache = ViewCache()
    ended_runs = EndedRuns(watch.source.directory)
    responses = Responses(cache, ended_runs)
    events = Events(watch, cache, lambda view, run: responses.status_body(view, run).plain)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        follower = asyncio.create_task(watch.follow(INTERVAL, responses.history.add, responses.run_log.add))
        yield
        follower.cancel()

    # No /docs and /redoc: these pages load scripts from other sites. /openapi.json stays.
    app = FastAPI(
        title="tierd",
        summary="Memory tiering at a glance",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        responses=REFUSALS,
    )
    app.add_middleware(Guard, access=access)
    with_examples(app)
    # /openapi.json lists the routes in this order.
    api = APIRouter(prefix="/v1", dependencies=[Depends(known_parameters)])
    _add_json_routes(api, watch, responses)
    _add_events(api, watch, events)
    app.include_router(api)
    _add_metrics(app, watch, events, ended_runs)
    _add_probes(app, watch, events, expect_ranks)
    _add_web_page(app)
    app.add_exception_handler(TelemetryError, _directory_unreadable)
    app.add_exception_handler(NotHereError, _not_found)
    app.add_exception_handler(RequestValidationError, _invalid_request)
    return app


def _add_json_routes(api: APIRouter, watch: Watch, responses: Responses) -> None:
    """The routes that describe the current View, in JSON."""

    @api.get("/status", response_model=Status, responses=NOT_FOUND_OR_INVALID)
    async def get_status(run: Run = None) -> Response:
        """An overview of all runs."""
        view = await watch.now()
        view.select(run)
        return JsonResponse(responses.status_body(view, run))

    @api.get("/runs", response_model=Runs, responses=INVALID)
    async def get_runs() -> Response:
        """A summary of each run on this node, and the runs that ended last."""
        view = await watch.now()
        return responses.json(view, "runs", lambda: runs(responses.status(view), responses.run_log.ended))

    @api.get("/runs/{run_id}", response_model=RunStatus, responses=NOT_FOUND_OR_INVALID)
    async def get_run(run_id: str) -> Response:
        """One run with all its ranks on this node."""
        view = await watch.now()
        view.select(run_id)
        return responses.json(view, ("run", run_id), lambda: only(responses.status(view), run_id).runs[0])

    @api.get("/readings", response_model=Readings, responses=INVALID)
    async def get_readings(descriptions: bool = True) -> Response:
        """All status files as they were read, for a tierd that shows several nodes."""
        view = await watch.now()
        return responses.json(view, ("readings", descriptions), lambda: readings(view, descriptions))

    def endpoint(noun: str, select: Callable[[View, str | None, int | None], BaseModel]) -> Endpoint:
        async def get(run: Run = None, rank: Rank = None) -> Response:
            view = await watch.now()
            return responses.json(view, (noun, run, rank), lambda: select(view, run, rank))

        return get

    for noun, (model, select, description) in RANK_ENDPOINTS.items():
        api.add_api_route(
            f"/{noun}",
            endpoint(noun, select),
            name=f"get_{noun}",
            description=description,
            response_model=model,
            responses=NOT_FOUND_OR_INVALID,
        )

    @api.get("/history", response_model=Histories, responses=NOT_FOUND_OR_INVALID)
    async def get_history(run: Run = None) -> Response:
        """Bandwidth, stalls and used bytes of the last ten minutes, one entry per second."""
        view = await watch.now()
        return responses.json(view, ("history", run), lambda: history(view, run, responses.history.of))


def _add_events(api: APIRouter, watch: Watch, events: Events) -> None:
    """The status as a stream, for clients that do not want to poll."""

    @api.get(
        "/events",
        status_code=200,
        response_class=Subscription,
        responses=NOT_FOUND_OR_INVALID
        | {200: {"description": "`event: status`; its data is that of /v1/status"}},
    )
    async def get_events(run: Run = None, interval: Interval = 1.0) -> Response:
        """The status as server-sent events: immediately, and then after each change."""
        if events.full:
            refusal = Detail(detail="too many subscribers; poll /v1/status instead, or try again later")
            return JSONResponse(refusal.model_dump(), 503, {"retry-after": "10"})
        with suppress(TelemetryError):  # the first event reports it
            (await watch.now()).select(run)
        return Subscription(events, interval, run)


def _add_metrics(app: FastAPI, watch: Watch, events: Events, ended_runs: EndedRuns) -> None:
    """The metrics, rendered in a thread in each format: this takes half a second for 64 ranks."""

    def scrape(form: str, zipped: bool) -> BackgroundRenderer[tuple[bytes, str]]:
        def body(view: View) -> tuple[bytes, str]:
            text, media_type = render(Scrape(view, events.subscribers, ended_runs.counts), form)
            return gzip.compress(text, LEVEL) if zipped else text, media_type

        return BackgroundRenderer(watch, body)

    scrapes = {
        (prefers_openmetrics(form), zipped): scrape(form, zipped)
        for form in (TEXT, OPENMETRICS)
        for zipped in (False, True)
    }

    @app.get("/metrics", response_class=PlainTextResponse)
    async def get_metrics(request: Request) -> Response:
        """Metrics in Prometheus' text format, or in OpenMetrics if the Accept header prefers it."""
        zipped = accepts_gzip(request.scope)
        openmetrics = prefers_openmetrics(request.headers.get("accept", ""))
        body, media_type = await scrapes[openmetrics, zipped].newest()
        headers = {"vary": "accept, accept-encoding"} | ({"content-encoding": "gzip"} if zipped else {})
        return Response(body, media_type=media_type, headers=headers)


def _add_probes(app: FastAPI, watch: Watch, events: Events, expect_ranks: int | None) -> None:
    """Probes for an orchestrator: liveness of the sidecar, readiness of the ranks, and details."""
    identity = Identity(watch.source.name, expect_ranks)

    @app.get("/livez", response_model=Alive)
    async def livez() -> Response:
        """Whether the sidecar answers."""
        return _json(Alive().model_dump_json().encode())

    @app.get("/readyz", response_model=Readiness, responses={503: {"model": Readiness | Detail}})
    async def readyz() -> Response:
        """Whether every rank that should be on this node has a fresh status file."""
        readiness = ready(await watch.now(), expect_ranks)
        return _json(readiness.model_dump_json().encode(), 200 if readiness.ready else 503)

    @app.get("/healthz", response_model=Health, responses={503: {"model": Health | Detail}})
    async def healthz() -> Response:
        """Readiness, and the state of the sidecar."""
        problem = None
        try:
            await watch.now()
        except TelemetryError as error:
            problem = as_text(str(error))
        health = identity.health(watch.last, problem, events.subscribers)
        return _json(health.model_dump_json().encode(), 200 if health.ready else 503)


def _add_web_page(app: FastAPI) -> None:
    """The files of the web page, read once. They do not belong to the API."""
    files = read_files()

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return _file(files["index.html"])

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        if name not in files:
            raise NotHereError("the web page has no file with this name")
        return _file(files[name])


async def _directory_unreadable(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": as_text(str(error))}, status_code=503)


async def _not_found(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, status_code=404)


async def _invalid_request(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    # The values are left out: they may be long, and the client knows them.
    problems = [f"{problem['loc'][-1]}: {problem['msg']}" for problem in error.errors()[:5]]
    return JSONResponse({"detail": "; ".join(problems)}, status_code=422)


def _file(file: File) -> Response:
    return Response(file.content, media_type=file.media_type)


def _json(body: bytes, status_code: int = 200) -> Response:
    return JsonResponse(Body(body), status_code)
