"""The HTTP application: routes, and what they answer of the View of the moment. Keeps nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel

from service.background import Aside
from service.cached import Kept
from service.ended_runs import Chronicle
from service.events import Events, Subscription
from service.health import Alive, Health, Identity, Readiness, ready
from service.history import INTERVAL, History
from service.http.guard import REFUSALS, Access, Detail, Guard
from service.http.parameters import known_parameters
from service.metrics import OPENMETRICS, TEXT, prefers_openmetrics, render
from service.responses.by_rank import (
    ByRank,
    RankBandwidth,
    RankConfig,
    RankSteps,
    RankTiers,
    bandwidth,
    config,
    steps,
    tiers,
)
from service.responses.examples import with_examples
from service.responses.history import Histories, history
from service.responses.plan import RankPlan, plan
from service.responses.status import Runs, RunStatus, Status, only, runs, status
from service.view import NotHereError, View
from service.watch import Watch
from service.web_page import File, read_files
from tiering.telemetry import TelemetryError, as_text

Run = Annotated[str | None, Query(description="only the run of this id", max_length=200)]
Rank = Annotated[int | None, Query(description="only this rank", ge=0, le=1 << 31)]
Interval = Annotated[float, Query(description="seconds between events, at least", ge=0.25, le=60)]

NOT_UNDERSTOOD: dict[int | str, dict[str, Any]] = {
    422: {"model": Detail, "description": "A parameter is unknown, or is not what it should be"},
}
ASKED: dict[int | str, dict[str, Any]] = {
    404: {"model": Detail, "description": "What is asked for has no page on this node"},
    **NOT_UNDERSTOOD,
}

Answering = Callable[..., Awaitable[Response]]
OF_RANKS: dict[str, tuple[object, Callable[[View, str | None, int | None], BaseModel], str]] = {
    "tiers": (ByRank[RankTiers], tiers, "What each tier holds, may hold and held at most."),
    "bandwidth": (
        ByRank[RankBandwidth],
        bandwidth,
        "Each path and the device's link in both directions, and collectives: now, on average, at most; latencies.",
    ),
    "steps": (ByRank[RankSteps], steps, "The recent steps, and where their time went."),
    "config": (
        ByRank[RankConfig],
        config,
        "The configuration in effect, with the origin of each value.",
    ),
    "plan": (ByRank[RankPlan], plan, "What the placement said, beside what is."),
}


class Answers:
    """What is answered of a View, made once for each View, and the past that some answers tell of."""

    def __init__(self, kept: Kept) -> None:
        self.past, self.chronicle = History(), Chronicle()
        self._kept = kept

    def told(self, view: View) -> Status:
        """The status of all runs, which several answers are parts of."""
        return self._kept.of(view, "told", lambda: status(view, self.past.latest))

    def status_of(self, view: View, run: str | None) -> bytes:
        """As bytes: /v1/events sends the same ones as /v1/status."""
        return self._kept.of(
            view, ("status", run), lambda: only(self.told(view), run).model_dump_json().encode()
        )

    def json(self, view: View, key: Hashable, make: Callable[[], BaseModel]) -> Response:
        """What ``make`` makes, or has made of this View for who asked by ``key`` before."""
        return _json(self._kept.of(view, key, lambda: make().model_dump_json().encode()))


def create_app(watch: Watch, *, expect_ranks: int | None = None, access: Access | None = None) -> FastAPI:
    """The sidecar for the pages that ``watch`` reads.

    ``expect_ranks`` is how many must publish for /readyz; ``access`` says who is let in (default: who asks for
    localhost or an IP address).
    """
    kept = Kept()
    answers = Answers(kept)
    events = Events(watch, kept, answers.status_of)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        following = asyncio.create_task(watch.follow(INTERVAL, answers.past.add, answers.chronicle.add))
        yield
        following.cancel()

    # The bundled documentation pages load scripts from elsewhere; /openapi.json stays.
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
    _add_answers(api, watch, answers)
    _add_events(api, watch, events)
    app.include_router(api)
    _add_metrics(app, watch, events)
    _add_probes(app, watch, events, expect_ranks)
    _add_page(app)
    app.add_exception_handler(TelemetryError, _directory_lost)
    app.add_exception_handler(NotHereError, _not_here)
    app.add_exception_handler(RequestValidationError, _not_understood)
    return app


def _add_answers(api: APIRouter, watch: Watch, answers: Answers) -> None:
    """The routes that answer of the View of the moment, in JSON."""

    @api.get("/status", response_model=Status, responses=ASKED)
    async def get_status(run: Run = None) -> Response:
        """Everything at a glance."""
        view = await watch.now()
        view.select(run)
        return _json(answers.status_of(view, run))

    @api.get("/runs", response_model=Runs, responses=NOT_UNDERSTOOD)
    async def get_runs() -> Response:
        """All runs of this node, in short, and the last of those that ended."""
        view = await watch.now()
        return answers.json(view, "runs", lambda: runs(answers.told(view), answers.chronicle.ended))

    @api.get("/runs/{run_id}", response_model=RunStatus, responses=ASKED)
    async def get_run(run_id: str) -> Response:
        """One run with all its ranks on this node."""
        view = await watch.now()
        view.select(run_id)
        return answers.json(view, ("run", run_id), lambda: only(answers.told(view), run_id).runs[0])

    def by_rank(noun: str, of: Callable[[View, str | None, int | None], BaseModel]) -> Answering:
        async def answered(run: Run = None, rank: Rank = None) -> Response:
            view = await watch.now()
            return answers.json(view, (noun, run, rank), lambda: of(view, run, rank))

        return answered

    for noun, (model, of, description) in OF_RANKS.items():
        api.add_api_route(
            f"/{noun}",
            by_rank(noun, of),
            name=f"get_{noun}",
            description=description,
            response_model=model,
            responses=ASKED,
        )

    @api.get("/history", response_model=Histories, responses=ASKED)
    async def get_history(run: Run = None) -> Response:
        """Bandwidth, stalls and occupancy of the last ten minutes, an entry per second."""
        view = await watch.now()
        return answers.json(view, ("history", run), lambda: history(view, run, answers.past.of))


def _add_events(api: APIRouter, watch: Watch, events: Events) -> None:
    """The status for who would rather be told than ask."""

    @api.get(
        "/events",
        status_code=200,
        response_class=Subscription,
        responses=ASKED | {200: {"description": "`event: status`; its data is that of /v1/status"}},
    )
    async def get_events(run: Run = None, interval: Interval = 1.0) -> Response:
        """The status as server-sent events: at once, and then whenever something changed."""
        if events.full:
            refused = Detail(detail="too many subscribers listen already; ask /v1/status instead")
            return JSONResponse(refused.model_dump(), 503, {"retry-after": "10"})
        with suppress(TelemetryError):  # the first event tells it
            (await watch.now()).select(run)
        return Subscription(events, interval, run)


def _add_metrics(app: FastAPI, watch: Watch, events: Events) -> None:
    """The scrape, made aside in each form: it takes half a second for 64 ranks."""

    def scrape(form: str) -> Aside[tuple[bytes, str]]:
        return Aside(watch, lambda view: render(view, form, events.subscribers))

    scrapes = {prefers_openmetrics(form): scrape(form) for form in (TEXT, OPENMETRICS)}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def get_metrics(request: Request) -> Response:
        """For Prometheus: its text form, or OpenMetrics where that is asked for."""
        body, media_type = await scrapes[prefers_openmetrics(request.headers.get("accept", ""))].newest()
        return Response(body, media_type=media_type, headers={"vary": "accept"})


def _add_probes(app: FastAPI, watch: Watch, events: Events, expect_ranks: int | None) -> None:
    """What an orchestrator asks: to restart the sidecar, to wait for the ranks, to see what is wrong."""
    identity = Identity(str(watch.directory), expect_ranks)

    @app.get("/livez", response_model=Alive)
    async def livez() -> Response:
        """Whether the sidecar itself answers."""
        return _json(Alive().model_dump_json().encode())

    @app.get("/readyz", response_model=Readiness, responses={503: {"model": Readiness | Detail}})
    async def readyz() -> Response:
        """Whether every rank that should be on this node has a fresh page."""
        readiness = ready(await watch.now(), expect_ranks)
        return _json(readiness.model_dump_json().encode(), 200 if readiness.ready else 503)

    @app.get("/healthz", response_model=Health, responses={503: {"model": Health | Detail}})
    async def healthz() -> Response:
        """Both of the above, and the sidecar's own state."""
        problem = None
        try:
            await watch.now()
        except TelemetryError as error:
            problem = as_text(str(error))
        health = identity.health(watch.last, problem, events.subscribers)
        return _json(health.model_dump_json().encode(), 200 if health.ready else 503)


def _add_page(app: FastAPI) -> None:
    """The files of the page, read once; they are no part of the API."""
    files = read_files()

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return _file(files["index.html"])

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        if name not in files:
            raise NotHereError("the page has no file of this name")
        return _file(files[name])


async def _directory_lost(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": as_text(str(error))}, status_code=503)


async def _not_here(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, status_code=404)


async def _not_understood(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    # Not what was sent: it may be long, and it is known to who sent it.
    wrong = [f"{one['loc'][-1]}: {one['msg']}" for one in error.errors()[:5]]
    return JSONResponse({"detail": "; ".join(wrong)}, status_code=422)


def _file(file: File) -> Response:
    return Response(file.content, media_type=file.media_type)


def _json(body: bytes, status_code: int = 200) -> Response:
    return Response(body, status_code, media_type="application/json")
