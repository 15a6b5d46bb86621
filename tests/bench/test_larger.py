"""What bench_larger_than_memory.py trains, what it sees of a process, what it concludes, and that it ends clean."""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_larger_than_memory
import pytest
import torch
from frame.report import Report
from frame.side import BENCH
from larger import child, picture, room, shards, tables, watch
from larger.child import Task
from larger.shape import SMALLEST, Shape, of_size
from larger.watch import ChildError, Recording, Sample
from safetensors import safe_open
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tiering.errors import TieringError

Command = Callable[..., tuple[int, str, Any, str]]

GB = 10**9
LIKE_LLAMA_3B = Shape(8, 28)


def on_meta(shape: Shape) -> nn.Module:
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**shape.config(sequence=16)))


class TestShape:
    @pytest.mark.parametrize("shape", [SMALLEST, Shape(2, 5), LIKE_LLAMA_3B], ids=str)
    def test_counts_what_transformers_builds(self, shape: Shape) -> None:
        model = on_meta(shape)
        sizes = [parameter.numel() for parameter in model.parameters()]
        assert (shape.parameters, shape.embedding) == (sum(sizes), max(sizes))
        assert shape.block == sum(parameter.numel() for parameter in model.model.layers[0].parameters())

    def test_eight_units_are_llama_3_2_3b(self) -> None:
        """Its config.json, and the size that its card gives."""
        expected = {
            "vocab_size": 128256,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 28,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        }
        assert LIKE_LLAMA_3B.config(16).items() >= expected.items()
        assert LIKE_LLAMA_3B.parameters == 3_212_749_824

    @pytest.mark.parametrize("numel", [8 * 10**6, 10**8, 2 * 10**9, 3 * 10**9, LIKE_LLAMA_3B.parameters])
    def test_of_size_takes_what_fits_in_the_usual_proportions(self, numel: int) -> None:
        shape = of_size(numel)
        assert numel - shape.block < shape.parameters <= numel
        assert 2 <= shape.blocks / shape.units <= 7 or shape.units == 1

    def test_of_size_meets_the_shape_that_the_rule_is_from(self) -> None:
        assert of_size(LIKE_LLAMA_3B.parameters) == LIKE_LLAMA_3B

    def test_nothing_is_that_small(self) -> None:
        assert of_size(SMALLEST.parameters) == SMALLEST
        with pytest.raises(ValueError, match=str(SMALLEST.parameters)):
            of_size(SMALLEST.parameters - 1)


class TestRoom:
    def test_what_it_counts_on_is_all_of_the_memory(self) -> None:
        device, host = room.budgets(6 * GB, GB // 2, LIKE_LLAMA_3B, 64)
        embedding = 2 * LIKE_LLAMA_3B.embedding
        assert embedding < device < 1.01 * embedding
        beside = 3 * embedding + room.activations(LIKE_LLAMA_3B, 64) + room.SPARE
        assert device + host + beside + GB // 2 == 6 * GB

    def test_the_plan_is_for_a_disk_without_end(self, tmp_path: Path) -> None:
        device, host = room.budgets(6 * GB, GB // 2, LIKE_LLAMA_3B, 64)
        config = room.configuration(str(tmp_path), LIKE_LLAMA_3B, device, host)
        plan = room.planned(on_meta(LIKE_LLAMA_3B), config)
        assert plan.state_bytes() == pytest.approx(16 * LIKE_LLAMA_3B.parameters, rel=1e-4)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 8, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(8, dtype=torch.bfloat16)
        self.head = nn.Linear(8, 100, bias=False)
        self.head.weight = self.embedding.weight


class TestShards:
    def test_are_what_safetensors_reads(self, tmp_path: Path) -> None:
        model = Tied()
        nbytes = shards.write(model, tmp_path, shard_bytes=1024)
        files = sorted(tmp_path.glob("*.safetensors"))
        names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        assert [file.name for file in files] == names
        assert nbytes == sum(file.stat().st_size for file in files)
        parameters = dict(model.named_parameters())
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {
            "embedding.weight": names[0],
            "norm.weight": names[1],
            "norm.bias": names[1],
        }
        assert index["metadata"]["total_size"] == sum(2 * p.numel() for p in parameters.values())
        for name, parameter in parameters.items():
            with safe_open(tmp_path / index["weight_map"][name], "pt") as file:
                assert file.get_tensor(name).equal(parameter)


class TestWatch:
    def test_a_sample_sees_what_a_process_touches(self) -> None:
        before = watch.sample(os.getpid())
        with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as touched:
            touched.write(bytes(len(touched)))
            after = watch.sample(os.getpid())
        assert before is not None and after is not None
        assert 60 << 20 < after.anonymous - before.anonymous < 200 << 20
        assert after.resident >= after.anonymous and after.at > before.at

    def test_a_process_that_is_gone_has_no_sample(self) -> None:
        with subprocess.Popen([sys.executable, "-c", ""]) as process:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            assert watch.sample(process.pid) is None
        assert watch.sample(process.pid) is None

    def test_a_child_is_heard_seen_and_quoted(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "larger").mkdir()
        (tmp_path / "larger" / "child.py").write_text(
            "import json, os, sys, time\n"
            "def tell(event, **fields):\n"
            "    os.write(int(sys.argv[2]), json.dumps({'event': event, **fields}).encode() + b'\\n')\n"
            "tell('ready', steps=json.loads(sys.argv[1])['steps'], threads=os.environ['OMP_NUM_THREADS'])\n"
            f"time.sleep({3 * watch.EVERY})\n"
            "tell('refused', message='too large')\n"
            "sys.exit(2)\n"
        )
        monkeypatch.setattr(watch, "_BENCH", tmp_path)
        task = Task("", Shape(2, 4), GB, disk=GB, sequence=16, steps=7, threads=3)
        recording, names = Recording(), []
        with pytest.raises(ChildError, match=r"^too large$"):
            watch.watch(task, recording, lambda event: names.append(event["event"]))
        assert names == ["ready", "refused"]
        assert recording.event("ready").items() >= {"steps": 7, "threads": "3"}.items()
        assert recording.samples and all(sample.resident > 0 for sample in recording.samples)

    def test_what_the_plan_puts_on_the_disk_has_to_fit(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Work is done here: a process of its own would import torch and transformers for it."""
        limits, events = [], {}
        monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: limits.append((kind, limit)))
        monkeypatch.setattr(child, "resident", lambda kind: GB // 2)  # not of this process, which is larger
        memory = 12 * GB // 10
        task = Task(str(tmp_path), Shape(2, 4), memory, disk=GB // 10, sequence=16, steps=1, threads=1)
        threads = torch.get_num_threads()
        try:
            with pytest.raises(TieringError, match=r"where 0\.1 GB may be taken"):
                child.work(task, lambda event, **fields: events.update({event: fields}))
        finally:
            torch.set_num_threads(threads)
        assert limits == [(resource.RLIMIT_DATA, (int(child.ANONYMOUS * memory),) * 2)]
        assert list(events) == ["ready", "plan"]
        assert events["plan"]["state"] > events["plan"]["on_nvme"] > GB // 10
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.slow
    def test_a_refusal_comes_from_a_process_of_its_own(self, tmp_path: Path) -> None:
        task = Task(str(tmp_path), Shape(2, 4), 12 * GB // 10, disk=GB // 10, sequence=16, steps=1, threads=1)
        recording, names = Recording(), []
        with pytest.raises(ChildError, match=r"where 0\.1 GB may be taken"):
            watch.watch(task, recording, lambda event: names.append(event["event"]))
        assert names == ["ready", "plan", "refused"]
        assert recording.event("plan")["state"] > 0 and recording.samples
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.slow
    def test_too_little_memory_is_refused(self, tmp_path: Path) -> None:
        task = Task(str(tmp_path), Shape(1, 2), GB // 2, disk=GB, sequence=16, steps=1, threads=1)
        with pytest.raises(ChildError, match="more by --memory"):
            watch.watch(task, Recording(), lambda event: None)

    def test_a_task_is_the_same_on_the_other_side(self, tmp_path: Path) -> None:
        task = Task(str(tmp_path), Shape(1, 2), 1, disk=2, sequence=3, steps=4, threads=5, load="weights")
        assert Task.from_json(json.dumps(dataclasses.asdict(task))) == task


def a_phase(name: str, began: float, **fields: Any) -> list[dict[str, Any]]:
    counts = {"read": 0, "written": 0, "disk_read": 0, "disk_written": 0, "stalled": 1.0, "more": {}}
    figures = counts | {"peak": 4 * GB, "seconds": 10.0} | fields
    return [
        {"event": "begin", "at": began, "name": name},
        {"event": "end", "at": began + figures["seconds"], "name": name} | figures,
    ]


def a_recording(*losses: float, **step: Any) -> Recording:
    """A process that has moved 30 GB in each step, unless ``step`` says otherwise."""
    recording = Recording()
    recording.events += [
        {"event": "ready", "at": 0.0, "baseline": GB // 2, "used": 7},
        {
            "event": "plan",
            "device": GB,
            "host": 2 * GB,
            "state": 48 * GB,
            "on_nvme": 45 * GB,
            "read": 20 * GB,
            "written": 10 * GB,
        },
        *a_phase("build", 1.0, peak=3 * GB),
        *a_phase("fill", 11.0, peak=5 * GB, written=45 * GB, disk_written=45 * GB),
    ]
    for number, loss in enumerate(losses, start=1):
        more = {"loss": loss, "forward": 2.0, "backward": 3.0, "update": 4.0}
        moved = {"read": 20 * GB, "written": 10 * GB, "disk_read": 20 * GB, "disk_written": 10 * GB}
        recording.events += a_phase(f"step {number}", 11.0 + 10 * number, **{"more": more} | moved | step)
    recording.events.append({"event": "result", "at": 99.0, "activations": GB // 4})
    recording.samples += [Sample(at, at * GB // 20, GB // 10, 0, 3 * GB) for at in range(0, 60, 5)]
    return recording


class TestTables:
    task = Task("", Shape(8, 28), 6 * GB, disk=60 * GB, sequence=128, steps=3, threads=2)

    def holds(self, recording: Recording) -> dict[str, bool]:
        report = Report("known", {})
        tables.show(report, "it", self.task, recording)
        return {verdict.what.partition(":")[0]: verdict.holds for verdict in report.verdicts}

    def test_everything_holds(self) -> None:
        assert self.holds(a_recording(9.0, 8.0, 7.0)) == {
            "peak RSS": True,
            "read from the disk itself": True,
            "NVMe bytes per step": True,
        }

    @pytest.mark.parametrize(
        ("subject", "step"),
        [
            ("peak RSS", {"peak": 6 * GB}),
            ("read from the disk itself", {"disk_read": 19 * GB}),
            ("NVMe bytes per step", {"written": 10 * GB + 4096}),
        ],
    )
    def test_each_goal_can_be_missed_alone(self, subject: str, step: dict[str, Any]) -> None:
        assert [name for name, holds in self.holds(a_recording(9.0, 8.0, **step)).items() if not holds] == [
            subject
        ]

    def test_weights_have_to_be_read_from_the_disk_too(self) -> None:
        recording, task = a_recording(9.0), dataclasses.replace(self.task, load="weights")
        assert tables.past_the_cache("it", self.task, recording).holds
        assert not tables.past_the_cache("it", task, recording).holds
        next(event for event in recording.events if event.get("name") == "fill" and "read" in event)[
            "disk_read"
        ] = 7 * GB
        assert tables.past_the_cache("it", task, recording).holds

    def test_the_first_step_moves_what_it_likes(self) -> None:
        recording = a_recording(9.0, 8.0)
        next(event for event in recording.events if event.get("name") == "step 1" and "read" in event)[
            "written"
        ] += 1
        assert self.holds(recording)["NVMe bytes per step"]

    def test_where_a_step_went(self) -> None:
        assert tables.steps("it", self.task, a_recording(9.0)).rows == [
            ("1", "9.0000", "10.0", "2.0", "3.0", "4.0", "1.0", "10%")
        ]
        assert tables.phases("it", a_recording(9.0)).rows[-1] == (
            *("step 1", "10.0", "20.00", "10.00", "3.00"),
            *("20.00 + 10.00", "4.00"),
        )

    def test_the_state_beside_the_machine(self) -> None:
        recording = a_recording()
        have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        for state in (have, have + 1):
            recording.event("plan")["state"] = state
            assert tables.larger_than_memory(recording).holds == (state > have)

    def test_a_loss_that_rises_is_told(self) -> None:
        assert tables.learned(a_recording(9.0, 9.5, 8.9)).holds
        assert not tables.learned(a_recording(9.0, 8.0, 9.0)).holds

    def test_loaded_weights_give_the_writers_loss(self) -> None:
        writer = a_recording(9.0)
        writer.events += a_phase("next loss", 50.0, more={"loss": 8.25})
        assert tables.same_weights(writer, a_recording(8.25, 8.0)).holds
        assert not tables.same_weights(writer, a_recording(8.250001, 8.0)).holds


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install tiering[bench]")
    picture.draw(
        {"one": a_recording(9.0, 8.0), "two": a_recording(8.0)}, 6 * GB, "known", tmp_path / "memory.png"
    )
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


class TestCommand:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--params", "5B6"], "invalid number of parameters '5B6'"),
            (["--params", "1M"], "the smallest shape"),
            (["--memory", "6 quarts"], "quarts"),
            (["--steps", "1"], "at least 2"),
        ],
    )
    def test_what_cannot_be_is_refused(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        arguments: list[str],
        message: str,
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["bench", str(tmp_path), *arguments])
        with pytest.raises(SystemExit, match="2"):
            bench_larger_than_memory.parse_arguments()
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("free", "arguments", "least", "most"),
        [
            (67 * GB, [], 2.1, 67 / 30),
            (67 * GB, ["--load"], 2.0, 67 / 32),
            (500 * GB, [], 2.9, 3.0),
            (5 * GB, ["--params", "3.25B"], 3.21, 3.22),
        ],
    )
    def test_the_size_follows_the_disk(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        free: int,
        arguments: list[str],
        least: float,
        most: float,
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["bench", str(tmp_path), *arguments])
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        options = bench_larger_than_memory.parse_arguments()
        assert least <= options.shape.parameters / 1e9 <= most
        assert ("are free" in options.size_by) == ("--params" not in arguments)

    def test_a_disk_without_room_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["bench", str(tmp_path)])
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
        with pytest.raises(SystemExit, match="2"):
            bench_larger_than_memory.parse_arguments()
        assert "1,000,000 bytes free" in capsys.readouterr().err

    @pytest.mark.slow
    def test_builds_trains_writes_and_loads(self, command: Command) -> None:
        status, text, raw, output = command("bench_larger_than_memory.py", "--quick", "--load")
        missed = [goal["what"] for goal in raw["goals"] if not goal["holds"]]
        assert missed == ["parameters, gradients and optimizer state / the machine's memory"], output
        assert status == 1
        assert "built and trained: steps" in text and "loaded and trained on: steps" in text

    @pytest.mark.slow
    @pytest.mark.parametrize("phase", ["build", "fill", "step 2"])
    def test_interrupted_it_leaves_nothing(self, tmp_path: Path, phase: str) -> None:
        disk = tmp_path / "disk"
        disk.mkdir()
        before = {"build": "nvme", "fill": "build:", "step 2": "step 1:"}[phase]
        script = BENCH / "bench_larger_than_memory.py"
        with subprocess.Popen(
            [sys.executable, script, disk, "--quick"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stderr is not None
            output = ""
            while before not in output:
                output += (line := process.stderr.readline())
                assert line, output
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
        assert process.returncode == 2
        assert list(disk.iterdir()) == []


def test_what_is_told_of_a_phase(capsys: pytest.CaptureFixture[str]) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    doing = child.Work(lambda event, **fields: events.append((event, fields)))
    with doing.phase("build") as more:
        more["loss"] = 1.5
        block = bytearray(32 << 20)
    (begin, first), (end, last) = events
    assert (begin, first["name"], end, last["name"], last["more"]) == (
        *("begin", "build", "end", "build"),
        {"loss": 1.5},
    )
    assert last["read"] == last["written"] == 0 and last["peak"] > len(block)
