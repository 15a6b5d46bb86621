"""The HTTP application: reads the run directory's pages on every request, keeps nothing in between."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from service.models import Alive, Status, status_of
from tiering.telemetry import TelemetryError, find_pages, run_directory, sweep

KEEP_STALE_SECONDS = 30.0  # long enough for an operator to see that a run died


def create_app(directory: Path | None = None, *, keep_stale_seconds: float = KEEP_STALE_SECONDS) -> FastAPI:
    """The sidecar for the pages in ``directory`` (default: ``run_directory()``).

    Pages of dead writers are shown as stale for ``keep_stale_seconds`` after their last update, then removed.
    Raises TelemetryError when the directory is not ours alone.
    """
    watched = run_directory() if directory is None else Path(directory)
    find_pages(watched)
    # The bundled documentation pages load scripts from elsewhere; /openapi.json stays.
    app = FastAPI(title="tierd", summary="Memory tiering at a glance", docs_url=None, redoc_url=None)
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")

    # Plain functions: FastAPI runs them on its thread pool, so a slow disk does not hold up other requests.
    @app.get("/v1/status", response_model=Status)
    def status() -> Response:
        sweep(watched, keep_stale_seconds)
        readings = [(found, found.read()) for found in find_pages(watched)]
        present = [(found, reading) for found, reading in readings if found.path.exists()]
        return Response(status_of(present).model_dump_json(), media_type="application/json")

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
