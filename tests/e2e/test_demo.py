from __future__ import annotations

import copy
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import tiering.demo.run
from tiering.cli import main
from tiering.config.ds_config import load
from tiering.config.training import TieringConfig
from tiering.demo.children import ChildError, Sidecar, Worker
from tiering.demo.comparison import judge, memory_table, verdict_table
from tiering.demo.corpus import Batches, standard_library
from tiering.demo.model import GPT
from tiering.demo.pytorch_loop import PlainLoop
from tiering.demo.run import FAILED, FAULT_MISSED, GOOD, UNUSABLE, demo, judge_fault
from tiering.demo.settings import Settings, Way
from tiering.demo.worker import digest, train
from tiering.errors import TieringError
from tiering.host import cpu_dtypes

TINY = Settings(steps=4, sequence=32, width=64, layers=2, heads=2, sample_bytes=4)


def small_gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(width=64, layers=2, heads=2, sequence=32)


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_under_torchrun_it_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str, lines: int
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    console = Console(file=io.StringIO(), width=100)
    assert demo(tmp_path, port=0, settings=TINY, console=console) == UNUSABLE
    assert console.file.getvalue().count("start it without torchrun") == lines


# -- What is trained -----------------------------------------------------------------------------------------


def test_the_default_model_is_large_enough() -> None:
    settings = Settings()
    with torch.device("meta"):
        model = GPT(
            width=settings.width, layers=settings.layers, heads=settings.heads, sequence=settings.sequence
        )
    assert sum(parameter.numel() for parameter in model.parameters()) >= 25_000_000


@pytest.mark.parametrize("way", [Way.NVME, Way.MEMORY])
@pytest.mark.parametrize("settings", [Settings(), Settings().in_fp32()], ids=["bf16", "fp32"])
def test_the_configuration_is_one_a_user_could_write(settings: Settings, way: Way) -> None:
    config, report = load(json.loads(json.dumps(settings.config(way, Path("/x"), "demo-1"))))
    assert isinstance(config, TieringConfig)
    assert not report.refused
    device = "nvme" if way is Way.NVME else "none"
    assert config.zero.offload_param.device == config.zero.offload_optimizer.device == device
    assert (config.precision, config.gradient_clipping, config.gradient_accumulation_steps) == (
        settings.precision,
        1.0,
        2,
    )
    assert config.tiering.cache_in_host is (way is Way.MEMORY)


def test_settings_travel_as_json() -> None:
    assert Settings.from_json(TINY.to_json()) == TINY


def test_the_model_sees_only_the_past() -> None:
    model = small_gpt()
    tokens = torch.arange(32)[None]
    changed = tokens.clone()
    changed[0, 20] = 99
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :20], after[0, :20])
    assert not torch.equal(before[0, 20:], after[0, 20:])


def test_batches_depend_on_their_index_only() -> None:
    text = standard_library()
    assert text.startswith(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[0].read_bytes())
    batches = Batches(text, size=3, sequence=16, seed=5)
    tokens, targets = batches[7]
    _ = batches[0]
    again, _ = Batches(text, size=3, sequence=16, seed=5)[7]
    assert torch.equal(tokens, again)
    assert tokens.shape == targets.shape == (3, 16)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert all(
        bytes([*row.tolist(), int(last)]) in text for row, last in zip(tokens, targets[:, -1], strict=True)
    )
    assert not torch.equal(tokens, batches[8][0])
    assert not torch.equal(tokens, Batches(text, size=3, sequence=16, seed=6)[7][0])


@pytest.mark.parametrize(
    "settings",
    [TINY, replace(TINY, clip=1e9, eps=1e-2), TINY.in_fp32()],
    ids=["clipped", "scale matters", "fp32"],
)
def test_the_plain_loop_is_adamw_on_fp32_masters(settings: Settings) -> None:
    """Against AdamW written out for one parameter, over two steps of two micro-batches."""
    loop = PlainLoop(small_gpt(), settings)
    batches = Batches(standard_library(), size=2, sequence=32, seed=1)
    name = "blocks.0.mlp_up.weight"
    master = loop.masters[name].detach().clone()
    first = second = torch.zeros_like(master)
    for step in range(1, 3):
        twin = copy.deepcopy(loop.model)
        gradients = {key: torch.zeros_like(value) for key, value in loop.masters.items()}
        pairs = [batches[2 * step + micro] for micro in range(2)]
        for tokens, targets in pairs:
            twin.zero_grad()
            (twin(tokens, targets) / 2).backward()
            for key, parameter in twin.named_parameters():
                gradients[key] += parameter.grad.float()
        norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        gradient = gradients[name] * min(1.0, settings.clip / (float(norm) + 1e-6))
        first = settings.betas[0] * first + (1 - settings.betas[0]) * gradient
        second = settings.betas[1] * second + (1 - settings.betas[1]) * gradient**2
        update = (first / (1 - settings.betas[0] ** step)) / (
            (second / (1 - settings.betas[1] ** step)).sqrt() + settings.eps
        )
        master = master * (1 - settings.lr * settings.weight_decay) - settings.lr * update
        loop.step(pairs)
        torch.testing.assert_close(loop.masters[name].detach(), master, rtol=1e-5, atol=1e-7)
        weights = dict(loop.model.named_parameters())
        dtype = torch.float32 if settings.precision == "fp32" else torch.bfloat16
        assert {weight.dtype for weight in weights.values()} == {dtype}
        assert all(torch.equal(weights[key], value.to(dtype)) for key, value in loop.masters.items())


def test_a_digest_covers_names_dtypes_shapes_and_every_bit() -> None:
    weights = {"a": torch.arange(6.0), "b": torch.ones(2, dtype=torch.bfloat16)}
    flipped = {"a": weights["a"].clone(), "b": weights["b"]}
    flipped["a"].view(torch.int32)[3] ^= 1
    others = [
        flipped,
        {"a": weights["a"].view(2, 3), "b": weights["b"]},
        {"c": weights["a"], "b": weights["b"]},
        {"a": weights["a"], "b": weights["b"].view(torch.int16)},
        {"a": weights["a"]},
    ]
    assert len({digest(weights), *map(digest, others)}) == 6
    assert digest(weights) == digest(dict(reversed(weights.items())))


# -- What is said about it -----------------------------------------------------------------------------------


def results(**changes: Any) -> dict[Way, dict[str, Any]]:
    def result(losses: list[float], read: int) -> dict[str, Any]:
        digests = {"model weights": "a" * 64, "fp32 masters": "b" * 64}
        tiers = [
            {"name": "device", "peak": 10, "budget": 20},
            {"name": "host", "peak": 30, "budget": 40},
            {"name": "nvme", "peak": 500, "budget": 600},
        ]
        moved = {"read": read, "written": read, "stalled": 0.0}
        memory = {"baseline": 2**20, "peak": 3 * 2**20, "tiers": tiers, "state_bytes": 2**30}
        return {"losses": losses, "digests": digests, "sample": "x", **moved, **memory}

    results = {
        Way.NVME: result([5.0, 4.0, 3.0, 2.0], 10) | changes,
        Way.MEMORY: result([5.0, 4.0, 3.0, 2.0], 0),
        Way.PLAIN: result([5.0, 4.25, 3.0, 2.0], 0),
    }
    for key in ("tiers", "state_bytes", "sample"):
        del results[Way.PLAIN][key]
    return results


def test_a_good_verdict_needs_all_of_it() -> None:
    verdict = judge(results(), run_in_status=True)
    assert verdict.good
    assert (verdict.nvme_bytes, verdict.first_loss, verdict.last_loss) == (20, 5.0, 2.0)
    assert verdict.plain_difference == 0.25
    assert not judge(results(), run_in_status=False).good
    assert not judge(results(read=0, written=0), run_in_status=True).good
    assert not judge(results(losses=[5.0, 4.0, 3.0, 5.0]), run_in_status=True).good
    for digests in ({"model weights": "a" * 64, "fp32 masters": "c" * 64}, {"model weights": "a" * 64}):
        assert not judge(results(digests=digests), run_in_status=True).good


def printed(*tables: Any) -> str:
    console = Console(width=140, record=True, file=io.StringIO())
    for table in tables:
        console.print(table)
    return console.export_text()


def test_tables_show_the_figures() -> None:
    text = printed(verdict_table(results(), judge(results(), run_in_status=True)), memory_table(results()))
    for part in ("equal", "moved", "5.000 -> 2.000", "2.50e-01", "2.00 MiB", "40 B", "60 B", "1.00 GiB"):
        assert part in text, part
    broken = results(digests={"model weights": "d" * 64, "fp32 masters": "b" * 64}, read=0)
    text = printed(verdict_table(broken, judge(broken, run_in_status=False)))
    for part in ("DIFFERENT", "NOTHING MOVED", "NO"):
        assert part in text, part


# -- Its processes -------------------------------------------------------------------------------------------


def processes_of(mark: str) -> list[str]:
    """Command lines of running processes that contain ``mark``."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it just ended
        if mark in line:
            processes.append(line)
    return processes


def run_names(pid: int) -> str:
    """What marks the workers of the demo that runs as ``pid``."""
    return f"--run-name demo-{socket.gethostname().split('.')[0]}-{pid}"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


ENDLESS = """
import sys
from pathlib import Path
import tiering.demo.run
from tiering.demo.children import Worker
from tiering.demo.settings import Settings

class Told(Worker):
    def stop(self):
        super().stop()
        print("the worker ended with", self.process.returncode)

tiering.demo.run.Worker = Told
directory, port, settings = sys.argv[1:]
sys.exit(tiering.demo.run.demo(Path(directory), port=int(port), settings=Settings.from_json(settings)))
"""


@contextmanager
def training(directory: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """A demo whose worker trains, and would for hours; it is killed at the end, or when its time is over."""
    many = replace(TINY, steps=10**9)
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(directory), str(port), many.to_json()],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        limit = threading.Timer(180, process.kill)
        limit.start()
        try:
            assert process.stdout is not None
            assert any("/v1/status, step" in line for line in process.stdout), "it does not come to train"
            yield process
        finally:
            limit.cancel()
            process.kill()


def run_tiny(directory: Path, settings: Settings = TINY, **options: Any) -> tuple[int, str]:
    console = Console(width=140, record=True, file=io.StringIO())
    code = demo(directory, port=0, settings=settings, console=console, **options)
    assert processes_of(run_names(os.getpid())) == []
    return code, console.export_text()


class Here(Worker):
    """A worker's work without a process of its own, which would import torch for it."""

    def __init__(self, way: Way, settings: Settings, directory: Path, **options: Any) -> None:
        events: list[dict[str, Any]] = []
        arguments = Namespace(way=way, settings=settings.to_json(), dir=directory, **options)
        try:
            train(arguments, lambda event, **fields: events.append({"event": event, **fields}))
        except TieringError as error:
            events.append({"event": "error", "message": str(error)})
        self.way = way
        self.pipe = io.StringIO("".join(f"{json.dumps(event)}\n" for event in events))
        # It has not waited.
        self.release = lambda: None
        self.process: Any = SimpleNamespace(poll=lambda: 0, wait=lambda *_: 0, stdout=None)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERING_DEVICE", "cpu")
    monkeypatch.setattr(tiering.demo.run, "Worker", Here)
    # A run has ended before its steps are told: the sidecar never shows it.
    monkeypatch.setattr(tiering.demo.run._Watch, "LAST_SECONDS", 0.0)


@pytest.mark.usefixtures("here")
def test_a_plain_worker_tells_each_step(tmp_path: Path) -> None:
    with Here(Way.PLAIN, TINY, tmp_path, run_name="r", columns=80, plant_fault=False) as worker:
        events = list(worker.events())
    assert [event["event"] for event in events] == ["step"] * 4 + ["trained", "result"]
    assert events[-1]["losses"] == [event["loss"] for event in events[:-2]]
    assert events[-1]["losses"][-1] < events[-1]["losses"][0]
    assert 0 < events[-1]["baseline"] <= events[-1]["peak"]


def test_a_worker_that_dies_is_reported(tmp_path: Path) -> None:
    with Worker(Way.PLAIN, TINY, tmp_path, run_name="r", columns=80, plant_fault=False) as worker:
        worker.process.kill()
        with pytest.raises(ChildError, match="trains with plain ended with code -9"):
            list(worker.events())


def test_a_taken_port_is_one_clear_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        console = Console(width=140, record=True, file=io.StringIO())
        assert demo(tmp_path, port=port, settings=TINY, console=console) == UNUSABLE
    assert re.search(rf"sidecar did not start: tierd: cannot listen on .*{port}", console.export_text())


def test_the_sidecar_answers_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERING_RUN_DIR", str(tmp_path / "run"))
    with Sidecar(0) as sidecar:
        assert sidecar.rank("no such run") is None
    assert sidecar.process.returncode == 0
    assert sidecar.rank("no such run") is None  # gone: training goes on without it


# -- The whole -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "processes", [[Way.NVME], pytest.param([*Way], marks=pytest.mark.slow)], ids=["one worker", "workers"]
)
def test_the_demo_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: list[Way]) -> None:
    """The others are trained here."""

    def start(way: Way, *arguments: Any, **options: Any) -> Worker:
        return (Worker if way in processes else Here)(way, *arguments, **options)

    monkeypatch.setenv("TIERING_DEVICE", "cpu")
    monkeypatch.setattr(tiering.demo.run, "Worker", start)
    seen = Sidecar.rank
    # The steps have long ended when the sidecar, on a busy machine, shows the run.
    late = [lambda *_: None, lambda *_: time.sleep(1)]
    monkeypatch.setattr(Sidecar, "rank", lambda *arguments: (late.pop(0) if late else seen)(*arguments))
    code, text = run_tiny(tmp_path)
    assert code == GOOD, text
    for part in (
        "Placement plan",
        "/v1/status, step",
        "placement changed nothing",
        "largest loss difference",
    ):
        assert part in text, part
    assert text.count("equal") == 2
    assert "DIFFERENT" not in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("settings", [TINY, replace(TINY, width=256).in_fp32()], ids=["bf16", "fp32"])
@pytest.mark.usefixtures("here")
def test_a_planted_fault_is_found(tmp_path: Path, settings: Settings) -> None:
    code, text = run_tiny(tmp_path, settings, plant_fault=True)
    assert code == FAILED, text
    assert "planted fault: " in text
    assert "the planted fault was found" in text
    assert "DIFFERENT" in text


def test_a_fault_that_goes_unnoticed_is_a_failure_of_its_own() -> None:
    console = Console(width=140, record=True, file=io.StringIO())
    assert judge_fault(console, detected=False) == FAULT_MISSED
    assert "THE PLANTED FAULT WAS NOT FOUND" in console.export_text()


@pytest.mark.usefixtures("here")
def test_a_missing_directory_is_refused_before_training(tmp_path: Path) -> None:
    code, text = run_tiny(tmp_path / "missing")
    assert code == UNUSABLE
    assert "TIER-SPACE" in text
    assert str(tmp_path / "missing") in text.replace("\n", "")
    assert "loss" not in text


@pytest.mark.usefixtures("here")
def test_a_budget_too_small_is_refused_before_training(tmp_path: Path) -> None:
    console = Console(width=140, record=True, file=io.StringIO())
    small = replace(TINY, host_budget="64K", device_budget="64K")
    assert demo(tmp_path, port=0, settings=small, console=console) == UNUSABLE
    text = console.export_text()
    assert "TIER-PLAN" in text
    assert "loss" not in text


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    port = free_port()
    with training(tmp_path, port) as process:
        mark = run_names(process.pid)
        assert len(processes_of(mark)) == 1
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        rest = process.stdout.read()
        assert process.wait(30) == 130
    assert "the worker ended with 130" in rest
    assert "nothing is left behind" in rest
    assert "Traceback" not in rest
    assert processes_of(mark) == processes_of(f"service.cli --port {port}") == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_killed_demo_takes_its_children_along(tmp_path: Path) -> None:
    port = free_port()
    with training(tmp_path, port) as process:
        process.kill()
    mark = run_names(process.pid)
    deadline = time.monotonic() + 20
    while (
        processes := processes_of(mark) + processes_of(f"service.cli --port {port}")
    ) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes == []


# -- The command line ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", ["1", "0", "-3", "many"])
def test_too_few_steps_are_refused(steps: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["demo", "--steps", steps])
    assert caught.value.code == 2


@pytest.mark.parametrize("slow", [False, True])
def test_what_the_command_was_told_reaches_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    calls: list[Any] = []

    def record(directory: Path, **options: Any) -> int:
        calls.append((directory, options))
        return FAULT_MISSED

    monkeypatch.setattr(tiering.demo.run, "demo", record)
    monkeypatch.setattr(cpu_dtypes, "is_slow", lambda dtype: slow)
    arguments = ["--dir", str(tmp_path), "--port", "7", "--steps", "9", "--plant-fault"]
    assert main(["demo", *arguments]) == FAULT_MISSED
    settings = Settings(steps=9).in_fp32() if slow else Settings(steps=9)
    assert calls == [(tmp_path, {"port": 7, "settings": settings, "plant_fault": True})]


def test_help_needs_no_torch() -> None:
    probe = "import sys, tiering.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0
