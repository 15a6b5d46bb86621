"""A real Prometheus scrapes a real tierd with the shipped rules: each end of a run is told and alerted."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.metrics.monitoring_files import FILES, text

from .processes import tierd, until

SIDECAR_PAGE = Path(__file__).parents[2] / "docs" / "tools" / "sidecar.md"
INTERVAL = "15s"  # of scrapes and of rules, as in most clusters

TRAINING = """
import atexit
import os

# Last of what runs at the exit of a child: torch takes two seconds to leave a forked process.
parent = os.getpid()
atexit.register(lambda: os.getpid() == parent or os._exit(0))

import errno
import json
import signal
import sys
import time
from pathlib import Path
import torch
import tiering
from tiering.storage.aio import AioContext, Fault, FaultPlan
from tiering.telemetry import find_status_files
from zero3 import initialize
from zero3.device import tiers  # all that an engine needs, before the children

home, pages, programs = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])

def start():
    nvme = {"device": "nvme", "nvme_path": str(home)}
    return tiering.initialize(
        model=torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
            "tiering": {
                "host_budget": "8MiB", "cache_in_host": False, "run_name": name, "telemetry": {"dir": str(pages)},
            },
        },
    ).engine

def train(engine, steps=3):
    for _ in range(steps):
        engine.backward(engine(torch.ones(1, 64)).sum())
        engine.step()

def published(step):
    \"\"\"Wait until the status file has it: a process that is killed cannot add to it.\"\"\"
    while not any(
        last.run_name == name and last.step == step
        for file in find_status_files(pages) if (last := file.read().snapshot) is not None
    ):
        time.sleep(0.05)

def break_the_disk():
    faults = FaultPlan((Fault("read", first=30, count=0, error=errno.EIO),))
    tiers.AioContext = lambda **options: AioContext(fault=faults, **options)

# Each end in a process of its own, which ends as that of a script does; torch is imported once.
children = []
for name, program in programs:
    rank = sum(name == earlier for earlier, _ in children)
    child = os.fork()
    if child == 0:
        if sum(name == other for other, _ in programs) > 1:
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[4],
            }
        exec(program)
        break
    children.append((name, child))
else:
    for _, child in children:
        os.waitpid(child, 0)
"""

RAISES = "raise RuntimeError('bad batch')"
STOPPED = "train(engine, 2); published(2); os.kill(os.getpid(), signal.SIGTERM); train(engine)"
# The name of a run, the program of each of its ranks, and what the metric then has as how, code and rank.
ENDS = {
    "finished": (["train(start())"], ("finished", "", "")),
    "exception": ([f"train(start()); {RAISES}"], ("failed", "RuntimeError", "0")),
    "with-engine": (
        [f"with start() as engine:\n    train(engine)\n    {RAISES}"],
        ("failed", "RuntimeError", "0"),
    ),
    "exit-status": (["train(start()); sys.exit(3)"], ("failed", "exit code 3", "0")),
    "disk": (["break_the_disk(); train(start(), 1000)"], ("failed", "TIER-IO", "0")),
    "preempted": (
        [f"engine = start(); engine.save_and_exit_on(save=lambda: None); {STOPPED}"],
        ("preempted", "SIGTERM", ""),
    ),
    "terminated": ([f"engine = start(); {STOPPED}"], ("died", "", "")),
    "killed": (
        ["train(start()); published(3); os.kill(os.getpid(), signal.SIGKILL)"],
        ("died", "", ""),
    ),
    "two-ranks": (
        ["train(start(), 1000)", "engine = start(); train(engine); raise KeyError('x')"],
        ("failed", "KeyError", "1"),
    ),
}
BAD = ("failed", "died")


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


class Prometheus:
    """The API of a server."""

    def __init__(self, url: str) -> None:
        self._url = url

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self._url + "/-/ready", timeout=20):
                return True
        except OSError:
            return False

    def query(self, expression: str) -> list[dict[str, str]]:
        """The labels of what it finds."""
        found = self._get("/api/v1/query?" + urllib.parse.urlencode({"query": expression}))
        return [series["metric"] for series in found["result"]]

    def firing(self) -> list[dict[str, Any]]:
        return [alert for alert in self._get("/api/v1/alerts")["alerts"] if alert["state"] == "firing"]

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(self._url + path, timeout=20) as answer:
            return json.load(answer)["data"]


@contextmanager
def prometheus(home: Path, target: str) -> Iterator[Prometheus]:
    """A server on loopback that scrapes ``target``, with the rules that an operator gets."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed (Debian: package prometheus)")
    (home / FILES["alerts"]).write_text(text(FILES["alerts"]), encoding="utf-8")
    config = {
        "global": {"scrape_interval": INTERVAL, "evaluation_interval": INTERVAL},
        "rule_files": [FILES["alerts"]],
        "scrape_configs": [{"job_name": "tierd", "static_configs": [{"targets": [target]}]}],
    }
    (home / "prometheus.yaml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = [
        program,
        f"--config.file={home / 'prometheus.yaml'}",
        f"--storage.tsdb.path={home / 'series'}",
        f"--web.listen-address={address}",
    ]
    with (home / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            server = Prometheus(f"http://{address}")
            until(lambda: server.is_ready() or process.poll() is not None, limit=60)
            assert process.poll() is None, (home / "log").read_text()
            yield server
        finally:
            process.kill()


def end_all(home: Path, pages: Path) -> None:
    """Train until each run has ended in its way."""
    programs = [(name, program) for name, (ranks, _) in ENDS.items() for program in ranks]
    subprocess.run(
        [sys.executable, "-c", TRAINING, str(home), str(pages), json.dumps(programs), str(free_port())],
        capture_output=True,
        timeout=90,
        check=True,
    )


@pytest.mark.slow
def test_each_end_of_a_run_is_told_and_alerted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TIERING_DEVICE", "cpu")
    pages = tmp_path / "run"
    pages.mkdir(mode=0o700)
    with tierd(pages) as sidecar, prometheus(tmp_path, sidecar.url.removeprefix("http://")) as server:
        end_all(tmp_path, pages)

        def ends() -> dict[str, tuple[str, ...]]:
            # The series stays for a minute.
            found = server.query("max_over_time(tiering_run_ended[10m]) == 1")
            return {
                series["run"]: tuple(series.get(label, "") for label in ("how", "code", "rank"))
                for series in found
            }

        until(lambda: len(ends()) == len(ENDS), limit=60)
        listed = sidecar.get("/v1/runs")
        names = {run["id"]: run["name"] for run in (*listed["runs"], *listed["ended"])}
        assert {names.get(run, run): end for run, end in ends().items()} == {
            name: end for name, (_, end) in ENDS.items()
        }
        bad = sorted(name for name, (_, (how, *_)) in ENDS.items() if how in BAD)

        def alerted() -> list[tuple[str, str]]:
            return sorted(
                (alert["labels"]["alertname"], names.get(run := alert["labels"]["run"], run))
                for alert in server.firing()
            )

        until(lambda: alerted() == [("TieringRunFailed", name) for name in bad], limit=60)
        summaries = {
            alert["annotations"]["summary"].partition(" has ")[2]
            for alert in server.firing()
            if names.get(run := alert["labels"]["run"], run) in ("two-ranks", "killed")
        }
        assert summaries == {"failed: KeyError, starting in rank 1", "died"}


def test_the_table_of_ends_is_what_prometheus_shows() -> None:
    page = SIDECAR_PAGE.read_text(encoding="utf-8")
    table = page.partition("| the run ends by | `how` |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| .* \| `(\w+)` \| (.*) \| (.*) \| (.*) \|$", table, re.MULTILINE)
    assert [
        (how, re.sub(r"`| \(.*\)|none", "", code), re.sub("none", "", rank), "TieringRunFailed" in alert)
        for how, code, rank, alert in rows
    ] == [(how, code, rank, how in BAD) for _, (how, code, rank) in ENDS.values()]
