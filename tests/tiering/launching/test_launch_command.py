"""``tiering launch``: the command lines that it prints, and real ranks on this machine and on two simulated nodes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tiering.cli import main

ROOT = Path(__file__).parents[3]
PYTHON = shlex.quote(sys.executable)
TORCHRUN = f"{PYTHON} -m torch.distributed.run"

Launch = Callable[..., tuple[int, str, str]]


@pytest.fixture
def launch(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Exit code, stdout and stderr of ``tiering launch --dry-run`` on a machine without GPUs."""
    monkeypatch.setenv("TIERING_DEVICE", "cpu")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in [*os.environ]:
        if name.startswith(("PYTHON", "SLURM_", "NCCL_", "GLOO_", "OMP_", "CUDA_", "TORCH_", "DS_ENV")):
            monkeypatch.delenv(name)
    (tmp_path / "hosts").write_text("a slots=4\nb slots=4\n")

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["launch", "--dry-run", *arguments])
        out, err = capsys.readouterr()
        return code, out.replace(str(tmp_path), "DIR"), err.replace(str(tmp_path), "DIR")

    return run


SCRIPT = "train.py --lr 1"
SHORT = {
    "$T1": "$T --standalone --nproc-per-node=1",
    "$T": f"{PYTHON} -m torch.distributed.run",
    "$NODES": "--nnodes=2",
    "$HEAD": "--master-addr=a --master-port=29500",
    "$RANK": "--no-python sh -c 'exec $P -u train.py --local_rank=\"$LOCAL_RANK\" --lr 1'",
    "$ENV": "cd DIR && exec env TIERING_DEVICE=cpu",
    "$P": PYTHON,
}
"""Parts of the lines below."""

LINES = {
    "": "$T1 $RANK",
    "--num_gpus 2": "$T --standalone --nproc-per-node=2 $RANK",
    "--num_accelerators=2 --master_port 7000 --no_local_rank": "$T --nnodes=1 --node-rank=0"
    f" --master-addr=127.0.0.1 --master-port=7000 --nproc-per-node=2 {SCRIPT}",
    "--no_local_rank --module": f"$T1 --module {SCRIPT}",
    "--no_local_rank --no_python": f"$T1 --no-python {SCRIPT}",
    "--module": "$T1 --no-python sh -c 'exec $P -u -m train.py --local_rank=\"$LOCAL_RANK\" --lr 1'",
    "--no_python": "$T1 --no-python sh -c 'exec train.py --local_rank=\"$LOCAL_RANK\" --lr 1'",
    "--bind_core_list 0-3,8 --enable_each_rank_log logs": "taskset -c 0-3,8 $T1 --log-dir=logs --redirects=3 $RANK",
    "-H hosts": "a: $ENV $T $NODES --node-rank=0 $HEAD --nproc-per-node=4 $RANK\n"
    "b: $ENV $T $NODES --node-rank=1 $HEAD --nproc-per-node=4 $RANK",
    "-H hosts --include b:1@a:0,2 --master_addr h": "a: $ENV $T $NODES --node-rank=0 --master-addr=h"
    " --master-port=29500 --nproc-per-node=2 $RANK\n"
    "b: $ENV $T $NODES --node-rank=1 --master-addr=h --master-port=29500 --nproc-per-node=1 $RANK",
    "-H hosts --exclude a": "b: $ENV $T --standalone --nproc-per-node=4 $RANK",
    "-H hosts --num_nodes 1 --num_gpus 3 --venv_script env.sh": "a: . env.sh && $ENV $T --standalone"
    " --nproc-per-node=3 $RANK",
    "-H hosts --no_ssh --node_rank 1": "$T $NODES --node-rank=1 $HEAD --nproc-per-node=4 $RANK",
    "-H hosts --launcher SLURM --launcher_args '--partition big'": "srun --nodes=2 --ntasks-per-node=4"
    f" --export=ALL --partition big $P -u {SCRIPT}",
    "-H hosts --launcher slurm --include b --master_port 7": "srun --nodes=1 --ntasks-per-node=4 --nodelist=b"
    f" --export=ALL,MASTER_PORT=7 $P -u {SCRIPT}",
    "--launcher slurm --num_nodes 3 --num_gpus 8": "srun --nodes=3 --ntasks-per-node=8 --export=ALL"
    f" $P -u {SCRIPT}",
    "-H hosts --launcher openmpi --module": "mpirun -n 8 --host a:4,b:4 -x TIERING_DEVICE=cpu -x MASTER_ADDR=a"
    f" -x MASTER_PORT=29500 $P -u -m {SCRIPT}",
    "-H hosts --launcher mpich --num_gpus 2": "mpirun -n 4 -ppn 2 -hosts a,b -genv TIERING_DEVICE cpu"
    f" -genv MASTER_ADDR a -genv MASTER_PORT 29500 $P -u {SCRIPT}",
}
"""By the options: what a dry run prints."""


@pytest.mark.parametrize("options", LINES)
def test_the_lines_of_a_job(launch: Launch, options: str) -> None:
    expected = LINES[options]
    for name, text in SHORT.items():
        expected = expected.replace(name, text)
    code, out, err = launch(*shlex.split(options), *SCRIPT.split())
    assert (code, err, out) == (0, "", f"{expected}\n")


def test_slots_are_gpus_where_there_are_some(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIERING_DEVICE")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    _, out, _ = launch("--no_local_rank", "train.py")
    assert out.startswith(PYTHON) and "--nproc-per-node=4" in out
    _, out, _ = launch("--no_local_rank", "--include", "localhost:1,3", "train.py")
    assert out.startswith(f"CUDA_VISIBLE_DEVICES=1,3 {PYTHON}") and "--nproc-per-node=2" in out
    _, out, _ = launch("-H", "hosts", "--exclude", "b:0,1", "train.py")
    visible = [line.partition("CUDA_VISIBLE_DEVICES=")[2].split()[0] for line in out.splitlines()]
    assert visible == ["0,1,2,3", "2,3"]
    _, out, _ = launch("--launcher", "slurm", "--num_nodes", "2", "--num_gpus", "8", "train.py")
    assert out.startswith("srun --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --export=ALL ")
    # Those that the user has made visible.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    _, out, _ = launch("--no_local_rank", "train.py")
    assert out.startswith(PYTHON) and "--nproc-per-node=2" in out


def test_variables_for_other_nodes(launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO now")
    monkeypatch.setenv("SECRET_TOKEN", "x")
    (tmp_path / ".deepspeed_env").write_text("# for all nodes\nHF_HOME=/data/a b\n\nMARK = 1\n")
    _, out, _ = launch("-H", "hosts", "--num_nodes", "1", "train.py")
    assert "env TIERING_DEVICE=cpu 'NCCL_DEBUG=INFO now' 'HF_HOME=/data/a b' MARK=1" in out
    assert "SECRET" not in out and "HF_HOME" not in launch("train.py")[1]
    (tmp_path / ".deepspeed_env").write_text("HF_HOME\n")
    code, _, err = launch("-H", "hosts", "train.py")
    assert code == 2 and "DIR/.deepspeed_env:1: 'HF_HOME' is not a variable; write 'NAME=VALUE'" in err
    monkeypatch.setenv("DS_ENV_FILE", "other_env")
    assert launch("-H", "hosts", "train.py")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--num_nodes 2", "--num_nodes 2 needs the names of the nodes; pass --hostfile"),
        ("--include localhost:0", "no GPU to select; --num_gpus N starts N ranks"),
        ("-H hosts --include a --exclude b", "--include and --exclude exclude each other"),
        ("-H hosts --include a --num_gpus 1", "cannot be combined with --include"),
        ("-H hosts --include c", "names the node 'c'; the nodes are a, b"),
        ("-H missing", "cannot read the hostfile missing"),
        ("-H hosts --no_ssh", "the number of this node among a, b is not known; pass --node_rank"),
        ("-H hosts --no_ssh --node_rank 2", "the number of this node"),
        ("--no_python --module", "exclude each other"),
        ("--autotuning run", "'tiering plan' computes what fits"),
        ("-H hosts --launcher slurm --include a:1", "srun cannot select GPUs by their numbers"),
        ("-H hosts --launcher slurm --exclude a:3", "the slots are a 3, b 4; use --num_gpus"),
        ("--launcher slurm --include a", "--include and --exclude need the slots of the nodes"),
        ("-H local", "the first node is localhost, which other nodes cannot reach; pass its address"),
    ],
)
def test_what_cannot_be_started_is_told(launch: Launch, tmp_path: Path, arguments: str, message: str) -> None:
    (tmp_path / "local").write_text("localhost slots=1\nb slots=1\n")
    code, out, err = launch(*shlex.split(arguments), "train.py")
    assert (code, out) == (2, "") and message in err


def test_a_program_that_is_not_installed_is_told(
    launch: Launch, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["launch", "--launcher", "slurm", "train.py"]) == 2
    assert "srun is not installed on this machine" in capsys.readouterr().err
    assert main(["launch", "-H", "hosts", "train.py"]) == 1
    out, err = capsys.readouterr()
    assert "ssh is not installed, so a, b cannot be reached from here; run each line on its node" in err
    assert [line.split(":")[0] for line in out.splitlines()] == ["a", "b"]


# Real ranks

RANK = """
import argparse, json, os, signal, sys, time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, required=True)
parser.add_argument("task")
args = parser.parse_args()
rank, stopped = int(os.environ["RANK"]), []
signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
variables = {name: os.environ.get(name) for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MARK")}
variables |= {"argv": sys.argv[1:], "pid": os.getpid()}
if args.task == "sum":
    import torch
    import tiering as deepspeed

    deepspeed.init_distributed(verbose=False)
    value = torch.tensor([rank + 1.0])
    deepspeed.comm.all_reduce(value)
    variables["sum"] = value.item()
    torch.distributed.destroy_process_group()
file = Path(f"rank{rank}.json")
file.with_suffix(".part").write_text(json.dumps(variables))
file.with_suffix(".part").rename(file)
if args.task == "fail" and rank == 1:
    sys.exit(3)
while not stopped:
    time.sleep(0.05)
Path(f"stopped{rank}").touch()
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts ``tiering launch`` in an empty directory; nodes a and b are this machine, by an ssh that is a shell."""
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    (tmp_path / ".deepspeed_env").write_text("MARK=here\n")
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text('#!/bin/sh\n[ "$1 $2" = "-o BatchMode=yes" ] || exit 9\nshift 3\nexec sh -c "$*"\n')
    ssh.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{ssh.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TIERING_DEVICE": "cpu",
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tiering.cli", "launch", *arguments]
        output = subprocess.PIPE
        started.append(
            subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=output, stderr=output, text=True)
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def reported(directory: Path, rank: int, seconds: float = 90) -> dict[str, Any]:
    file = directory / f"rank{rank}.json"
    deadline = time.monotonic() + seconds
    while not file.exists():
        assert time.monotonic() < deadline, f"rank {rank} has not started"
        time.sleep(0.05)
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def has_ended(pid: int, seconds: float = 60) -> bool:
    """Whether the process ends within this time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def two_nodes() -> tuple[str, ...]:
    return ("-H", "hosts", "--master_addr", "127.0.0.1", "--master_port", free_port())


def test_two_ranks_on_this_machine(job: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = job("--num_gpus", "2", "rank.py", "sum")
    for rank in (0, 1):
        found = reported(tmp_path, rank)
        assert (found["LOCAL_RANK"], found["WORLD_SIZE"], found["sum"]) == (str(rank), "2", 3.0)
        assert found["argv"] == [f"--local_rank={rank}", "sum"]
    assert [*ranks_that_stop(process, tmp_path)] == [0, 1]


@pytest.mark.slow
def test_two_ranks_on_two_nodes(job: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = job(*two_nodes(), "rank.py", "wait")
    for rank in (0, 1):
        found = reported(tmp_path, rank)
        assert (found["LOCAL_RANK"], found["WORLD_SIZE"], found["argv"][0]) == ("0", "2", "--local_rank=0")
        assert (found["MASTER_ADDR"], found["MARK"]) == ("127.0.0.1", "here")
    assert [*ranks_that_stop(process, tmp_path)] == [0, 1]


def ranks_that_stop(process: subprocess.Popen[str], directory: Path) -> Iterator[int]:
    """The ranks that get the SIGTERM that is sent to ``tiering launch``."""
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0 and err.startswith("tiering launch: ")
    yield from (rank for rank in (0, 1) if (directory / f"stopped{rank}").exists())


def test_a_rank_that_fails_ends_the_others(job: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = job(*two_nodes(), "-q", "rank.py", "fail")
    _, err = process.communicate(timeout=120)
    # torchrun's code; its report has that of the rank.
    assert process.returncode == 1 and "exitcode  : 3" in err and "tiering launch" not in err
    assert has_ended(reported(tmp_path, 0)["pid"]) and (tmp_path / "stopped0").exists()


@pytest.mark.slow
def test_nothing_is_left_on_the_nodes_of_a_launcher_that_is_killed(
    job: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = job(*two_nodes(), "rank.py", "wait")
    pids = [reported(tmp_path, rank)["pid"] for rank in (0, 1)]
    process.kill()
    assert all(has_ended(pid) for pid in pids)
