"""The HTTP application: routes, and what they answer of the View of the moment. Keeps nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel

from service.answers.examples import with_examples
from service.answers.history import Histories, history
from service.answers.of_rank import (
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
from service.answers.plan import RankPlan, plan
from service.answers.status import Runs, RunStatus, Status, run_status, runs, status
from service.events import Events, Subscription
from service.health import Alive, Health, Readiness, Sidecar, ready
from service.history import History
from service.http.guard import REFUSALS, Access, Guard, Refused
from service.metrics import prefers_openmetrics, render
from service.page import File, read_files
from service.view import FRESH_SECONDS, NotHereError, View
from service.watch import KEEP_STALE_SECONDS, MAX_AGE, Watch
from tiering.telemetry import TelemetryError, as_text

Run = Annotated[str | None, Query(description="only the run of this id", max_length=200)]
Rank = Annotated[int | None, Query(description="only this rank", ge=0, le=1 << 31)]
Interval = Annotated[float, Query(description="seconds between events, at least", ge=0.25, le=60)]

ASKED: dict[int | str, dict[str, Any]] = {
    404: {"model": Refused, "description": "What is asked for has no page on this node"},
    422: {"model": Refused, "description": "A parameter is not what it should be"},
}

Answering = Callable[..., Awaitable[Response]]
OF_RANKS: dict[str, tuple[object, Callable[[View, str | None, int | None], BaseModel], str]] = {
    "tiers": (ByRank[RankTiers], tiers, "What each tier holds, may hold and held at most."),
    "bandwidth": (
        ByRank[RankBandwidth],
        bandwidth,
        "Each path in both directions, and collectives: now, on average, at most; latencies; in flight.",
    ),
    "steps": (ByRank[RankSteps], steps, "The recent steps, and where their time went."),
    "config": (
        ByRank[RankConfig],
        config,
        "The configuration in effect, with the origin of each value.",
    ),
    "plan": (ByRank[RankPlan], plan, "What the placement said, beside what is."),
}


def create_app(
    directory: Path | None = None,
    *,
    keep_stale_seconds: float = KEEP_STALE_SECONDS,
    fresh_seconds: float = FRESH_SECONDS,
    max_age: float = MAX_AGE,
    expect_ranks: int | None = None,
    access: Access | None = None,
) -> FastAPI:
    """The sidecar for the pages in ``directory`` (default: ``run_directory()``).

    Pages of dead writers are shown as stale for ``keep_stale_seconds`` after their last update, then removed; a rank
    that has not published for ``fresh_seconds`` is silent; no answer is of pages read over ``max_age`` seconds ago.
    ``expect_ranks`` is how many must publish for /readyz.
    ``access`` says who is let in (default: who asks for localhost or an IP address). Raises TelemetryError when the
    directory is not ours alone.
    """
    watch = Watch(
        directory, keep_stale_seconds=keep_stale_seconds, fresh_seconds=fresh_seconds, max_age=max_age
    )
    past = History()
    events = Events(watch, lambda view: _of(view, "status", lambda: status(view, past.latest)))
    sidecar = Sidecar(str(watch.directory), expect_ranks)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        sampling = asyncio.create_task(past.follow(watch))
        yield
        sampling.cancel()

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
    files = read_files()

    @app.get("/v1/status", response_model=Status)
    async def get_status() -> Response:
        """Everything at a glance."""
        view = await watch.now()
        return _json(_of(view, "status", lambda: status(view, past.latest)))

    @app.get("/v1/runs", response_model=Runs)
    async def get_runs() -> Response:
        """All runs of this node, in short."""
        view = await watch.now()
        return _json(_of(view, "runs", lambda: runs(view)))

    @app.get("/v1/runs/{run_id}", response_model=RunStatus, responses=ASKED)
    async def get_run(run_id: str) -> Response:
        """One run with all its ranks on this node."""
        view = await watch.now()
        (run,) = view.select(run_id)
        return _json(_of(view, ("run", run_id), lambda: run_status(run, past.latest)))

    def by_rank(noun: str, answer: Callable[[View, str | None, int | None], BaseModel]) -> Answering:
        async def answered(run: Run = None, rank: Rank = None) -> Response:
            view = await watch.now()
            return _json(_of(view, (noun, run, rank), lambda: answer(view, run, rank)))

        return answered

    for noun, (model, answer, told) in OF_RANKS.items():
        app.add_api_route(
            f"/v1/{noun}",
            by_rank(noun, answer),
            name=f"get_{noun}",
            description=told,
            response_model=model,
            responses=ASKED,
        )

    @app.get("/v1/history", response_model=Histories, responses=ASKED)
    async def get_history(run: Run = None) -> Response:
        """Bandwidth, stalls and occupancy of the last ten minutes, an entry per second."""
        view = await watch.now()
        return _json(_of(view, ("history", run), lambda: history(view, run, past.of)))

    @app.get(
        "/v1/events",
        status_code=200,
        response_class=Subscription,
        responses={422: ASKED[422], 200: {"description": "`event: status`; its data is that of /v1/status"}},
    )
    async def get_events(interval: Interval = 1.0) -> Response:
        """The status as server-sent events: at once, and then whenever something changed."""
        if events.full:
            refused = Refused(detail="too many subscribers listen already; ask /v1/status instead")
            return JSONResponse(refused.model_dump(), 503, {"retry-after": "10"})
        return Subscription(events, interval)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def get_metrics(request: Request) -> Response:
        """For Prometheus: its text form, or OpenMetrics where that is asked for."""
        view, accepted = await watch.now(), request.headers.get("accept", "")
        body, media_type = view.once(
            ("metrics", prefers_openmetrics(accepted)), lambda: render(view, accepted, events.subscribers)
        )
        return Response(body, media_type=media_type, headers={"vary": "accept"})

    @app.get("/livez", response_model=Alive)
    async def livez() -> Response:
        """Whether the sidecar itself answers."""
        return _json(Alive().model_dump_json().encode())

    @app.get("/readyz", response_model=Readiness, responses={503: {"model": Readiness | Refused}})
    async def readyz() -> Response:
        """Whether every rank that should be on this node has a fresh page."""
        readiness = ready(await watch.now(), expect_ranks)
        return _json(readiness.model_dump_json().encode(), 200 if readiness.ready else 503)

    @app.get("/healthz", response_model=Health, responses={503: {"model": Health | Refused}})
    async def healthz() -> Response:
        """Both of the above, and the sidecar's own state."""
        problem = None
        try:
            await watch.now()
        except TelemetryError as error:
            problem = as_text(str(error))
        health = sidecar.health(watch.last, problem, events.subscribers)
        return _json(health.model_dump_json().encode(), 200 if health.ready else 503)

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return _file(files["index.html"])

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        if name not in files:
            raise NotHereError("the page has no file of this name")
        return _file(files[name])

    @app.exception_handler(TelemetryError)
    async def directory_lost(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": as_text(str(error))}, status_code=503)

    @app.exception_handler(NotHereError)
    async def not_here(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=404)

    @app.exception_handler(RequestValidationError)
    async def not_understood(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        # Not what was sent: it may be long, and it is known to who sent it.
        wrong = [f"{one['loc'][-1]}: {one['msg']}" for one in error.errors()[:5]]
        return JSONResponse({"detail": "; ".join(wrong)}, status_code=422)

    return app


def _file(file: File) -> Response:
    return Response(file.content, media_type=file.media_type)


def _of(view: View, key: Hashable, make: Callable[[], BaseModel]) -> bytes:
    return view.once(key, lambda: make().model_dump_json().encode())


def _json(body: bytes, status_code: int = 200) -> Response:
    return Response(body, status_code, media_type="application/json")
