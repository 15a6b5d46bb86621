"""A real ``tierd`` on loopback beside real engines: each goes on whatever happens to the other."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from service.app import create_app
from service.status_files import StatusFiles
from service.watch import Watch
from tiering.telemetry import find_status_files

from .processes import Sidecar, tierd, train, until


@contextmanager
def hammered(sidecar: Sidecar) -> Iterator[None]:
    """Ask it again and again meanwhile; every answer must be a 200."""
    over, failures, requests = threading.Event(), [], 0

    def ask() -> None:
        nonlocal requests
        while not over.is_set():
            for path in ("/v1/status", "/metrics", "/v1/history", "/v1/plan"):
                try:
                    with urllib.request.urlopen(sidecar.url + path, timeout=20) as answer:
                        answer.read()
                    requests += 1
                except OSError as error:
                    failures.append((path, error))
            over.wait(0.01)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield
        before = requests
        until(lambda: requests > before + 8)
    finally:
        over.set()
        asking.join()
    assert failures == []


def test_it_follows_an_engine_that_is_stopped_goes_on_and_is_killed(tmp_path: Path) -> None:
    pages = tmp_path / "run"
    soon_silent = create_app(Watch(StatusFiles(pages), fresh_seconds=0.75, max_age=0))
    with train(tmp_path, pages, pause=0.02) as training, tierd(pages) as sidecar:
        with hammered(sidecar), TestClient(soon_silent, base_url="http://localhost") as here:

            def state() -> str:
                (run,) = here.get("/v1/status").json()["runs"]
                return run["ranks"][0]["state"]

            def step() -> int:
                return sidecar.get("/v1/runs")["runs"][0]["step"]

            until(lambda: step() > 5)
            assert (sidecar.states(), sidecar.get("/readyz")["ready"]) == (["live"], True)
            (rank,) = sidecar.get("/v1/status")["runs"][0]["ranks"]
            assert (rank["pid"], rank["io"][0]["written"]["bytes"] > 0) == (training.process.pid, True)

            training.process.send_signal(signal.SIGSTOP)
            until(lambda: state() == "silent")
            unready = here.get("/readyz")
            assert unready.status_code == 503
            assert re.fullmatch(
                r"run small-gpt: rank 0 has not published for \d s", unready.json()["reasons"][0]
            )
            stopped_at = step()
            training.process.send_signal(signal.SIGCONT)
            until(lambda: state() == "live" and step() > stopped_at)
            assert here.get("/readyz").status_code == 200

            training.process.kill()
            training.process.wait()
            until(lambda: sidecar.states() == ["stale"])
            (run,) = sidecar.get("/v1/runs")["runs"]
            assert run["state"] == "ended"
            with pytest.raises(urllib.error.HTTPError) as refused:
                sidecar.get("/readyz")
            assert "every run here has ended" in refused.value.read().decode()
            # The log compares Views of its own, a second apart: the file stays until the log has the death.
            assert sidecar.process.stderr is not None
            log = "".join(sidecar.process.stderr.readline() for _ in range(2))
            (page,) = pages.glob("*.page")
            assert page.name.startswith(f"{run['id']}.0.")
            os.utime(page, (time.time() - 61,) * 2)  # as if it had died a minute ago
            until(lambda: sidecar.states() == [])
            assert [path.name for path in pages.iterdir()] == [f"{run['id']}.ended"]
            until(lambda: sidecar.get("/v1/runs")["ended"] != [])
            (closed_run,) = sidecar.get("/v1/runs")["ended"]
            assert (closed_run["id"], closed_run["how"], closed_run["ranks_live"]) == (run["id"], "died", 0)
            assert (closed_run["step"], closed_run["ended_at"]) >= (stopped_at, closed_run["started_at"])
        sidecar.process.send_signal(signal.SIGTERM)
        _, rest = sidecar.process.communicate(timeout=30)
        assert rest == ""
        assert re.fullmatch(
            f"tierd: run small-gpt \\({run['id']}\\) started: 1 of its 1 rank on this node\n"
            f"tierd: run small-gpt \\({run['id']}\\) has died at step \\d+: rank 0 is stale: the writer is gone\n",
            log,
        )


@pytest.mark.slow
def test_training_gives_the_same_with_a_sidecar_that_is_killed_as_without(tmp_path: Path) -> None:
    pages = tmp_path / "run"
    with train(tmp_path / "alone", tmp_path / "elsewhere", steps=60, pause=0.0) as alone:
        with tierd(pages) as sidecar, train(tmp_path / "watched", pages, pause=0.01) as watched:
            with hammered(sidecar):
                until(lambda: len(watched.losses) > 5)
                until(lambda: sidecar.states() == ["live"])
            sidecar.process.kill()
            sidecar.process.wait()
            killed_at = len(watched.losses)
            until(lambda: len(watched.losses) > killed_at + 10)
            watched.finish()
        until(lambda: alone.process.poll() is not None)
    common = min(len(watched.losses), len(alone.losses))
    assert common > 10
    assert watched.losses[:common] == alone.losses[:common]
    assert len(set(alone.losses)) == 60, "each step is one of its own"
    assert [page.read().state for page in find_status_files(pages)] == ["stale"], "its last words"
