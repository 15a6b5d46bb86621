"""The HTTP application: routes, and what they answer of the View of the moment. Keeps nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel

from service.answers.bandwidth import RankBandwidth, bandwidth
from service.answers.by_rank import ByRank
from service.answers.config import RankConfig, config
from service.answers.plan import RankPlan, plan
from service.answers.status import Runs, RunStatus, Status, run_status, runs, status
from service.answers.steps import RankSteps, steps
from service.answers.tiers import RankTiers, tiers
from service.guard import REFUSALS, Access, Guard
from service.metrics import render
from service.watch import KEEP_STALE_SECONDS, Watch
from tiering.telemetry import TelemetryError


class Alive(BaseModel):
    """The sidecar itself answers."""

    status: Literal["ok"] = "ok"


def create_app(
    directory: Path | None = None,
    *,
    keep_stale_seconds: float = KEEP_STALE_SECONDS,
    access: Access | None = None,
) -> FastAPI:
    """The sidecar for the pages in ``directory`` (default: ``run_directory()``).

    Pages of dead writers are shown as stale for ``keep_stale_seconds`` after their last update, then removed.
    ``access`` says who is let in (default: who asks for localhost or an IP address). Raises TelemetryError when the
    directory is not ours alone.
    """
    watch = Watch(directory, keep_stale_seconds=keep_stale_seconds)
    # The bundled documentation pages load scripts from elsewhere; /openapi.json stays.
    app = FastAPI(
        title="tierd",
        summary="Memory tiering at a glance",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=REFUSALS,
    )
    app.add_middleware(Guard, access=access)
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")

    # Plain functions: FastAPI runs them on its thread pool, so a slow disk does not hold up other requests.
    @app.get("/v1/status", response_model=Status)
    def get_status() -> Response:
        return _json(status(watch.view()))

    @app.get("/v1/runs", response_model=Runs)
    def get_runs() -> Response:
        return _json(runs(watch.view()))

    @app.get("/v1/runs/{run_id}", response_model=RunStatus)
    def get_run(run_id: str) -> Response:
        run = watch.view().run(run_id)
        if run is None:
            raise HTTPException(404, "no run of this id on this node; GET /v1/runs lists them")
        return _json(run_status(run))

    @app.get("/v1/tiers", response_model=ByRank[RankTiers])
    def get_tiers(run: str | None = None, rank: int | None = None) -> Response:
        return _json(tiers(watch.view(), run, rank))

    @app.get("/v1/bandwidth", response_model=ByRank[RankBandwidth])
    def get_bandwidth(run: str | None = None, rank: int | None = None) -> Response:
        return _json(bandwidth(watch.view(), run, rank))

    @app.get("/v1/steps", response_model=ByRank[RankSteps])
    def get_steps(run: str | None = None, rank: int | None = None) -> Response:
        return _json(steps(watch.view(), run, rank))

    @app.get("/v1/config", response_model=ByRank[RankConfig])
    def get_config(run: str | None = None, rank: int | None = None) -> Response:
        return _json(config(watch.view(), run, rank))

    @app.get("/v1/plan", response_model=ByRank[RankPlan])
    def get_plan(run: str | None = None, rank: int | None = None) -> Response:
        return _json(plan(watch.view(), run, rank))

    @app.get("/metrics", response_class=PlainTextResponse)
    def get_metrics(request: Request) -> Response:
        body, media_type = render(watch.view(), request.headers.get("accept"))
        return Response(body, media_type=media_type, headers={"vary": "accept"})

    @app.get("/livez")
    def livez() -> Alive:
        return Alive()

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    def index() -> str:
        return page

    @app.exception_handler(TelemetryError)
    def directory_lost(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=503)

    return app


def _json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")
