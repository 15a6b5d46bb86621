"""A run that saves now and then is killed at random moments and started again, and ends as the one that was not.

Each life is a fork of one program, which has imported torch once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
import hashlib, json, os, random, signal, sys, time
from pathlib import Path
import torch
import tiering
from tests.zero3.conftest import config
from tests.zero3.resuming import Model, tokens

os.environ["TIERING_DEVICE"] = "cpu"
case = json.loads(sys.argv[1])
root, kills, dice = Path(case["root"]), case["kills"], random.Random(case["seed"])
STEPS = 24

def digest(engine):
    sums = hashlib.sha256()
    for name, value in sorted({**engine.state_dict(), **engine.master_state_dict()}.items()):
        sums.update(name.encode() + value.float().numpy().tobytes())
    for name, param in engine.module.named_parameters():
        for kind in engine.state_names if param.requires_grad else ():
            sums.update(engine.get_fp32_state(name, kind).numpy().tobytes())
    return sums.hexdigest() + str(engine.global_steps)

def life(directory, seed, file):
    torch.set_num_threads(1)
    saves = random.Random(seed)
    torch.manual_seed(1)
    settings = config(root, accumulation=1, threshold=40, **case["options"])
    with tiering.initialize(model=Model(), config=settings).engine as engine:
        torch.manual_seed(100 + seed)  # what a checkpoint does not bring back would show
        engine.load_checkpoint(directory)
        began = engine.global_steps
        if not began:
            torch.manual_seed(2)
        for number in range(began, STEPS):
            engine.backward(engine(tokens(number)))
            engine.step()
            if saves.random() < 0.4:
                engine.save_checkpoint(directory, background=saves.random() < 0.5, keep=2)
        final_digest = digest(engine)
    file.write_text(json.dumps([final_digest, began]))

def born(*arguments):
    child = os.fork()
    if not child:
        try:
            life(*arguments)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return child

def is_finished(child):
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), f"a life ended with status {status}"
    return status == 0

began = time.monotonic()
assert is_finished(born(root / "straight", 0, root / "straight.json"))
span = time.monotonic() - began
killed = 0
while True:
    child = born(root / "killed", 1 + killed, root / "killed.json")
    if killed < kills:
        time.sleep(dice.uniform(0.2, 0.8) * span)
        os.kill(child, signal.SIGKILL)
    if is_finished(child):
        if killed >= kills:
            break
        (root / "killed.json").unlink()  # it was faster than the kill: again, from its last checkpoint
    killed += 1
straight, _ = json.loads((root / "straight.json").read_text())
resumed, at = json.loads((root / "killed.json").read_text())
left = sorted(path.name for path in (root / "killed").iterdir() if path.name.endswith("partial"))
print(json.dumps({"same": straight == resumed, "resumed at": at, "left": left}))
"""

MEMORY = """
import json, os, sys
from pathlib import Path
import torch
import tiering
from torch import nn
from tests.zero3.conftest import config

os.environ["TIERING_DEVICE"] = "cpu"
root = Path(sys.argv[1])

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))

def rise(work):
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    work()
    return status("VmHWM") - before

with tiering.zero.Init():
    model = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(32))
settings = config(root, offload_param="nvme", offload_optimizer="nvme", cache_in_host=False, host_budget="32MiB")
with tiering.initialize(model=nn.Sequential(*model), config=settings).engine as engine:
    growth = {
        "saved": rise(lambda: engine.save_checkpoint(root / "saved")),
        "saved in the background": rise(lambda: engine.save_checkpoint(root / "saved", background=True).wait()),
        "loaded": rise(lambda: engine.load_checkpoint(root / "saved")),
    }
print(json.dumps(growth))
"""

PLACES = {
    "memory": {"precision": "fp32"},
    "nvme": {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False, "state": "split"},
}


def report_of(tmp_path: Path, place: str, kills: int, seed: int) -> dict[str, object]:
    case = {"root": str(tmp_path), "kills": kills, "seed": seed, "options": PLACES[place]}
    return ran(RUN, json.dumps(case))


def ran(program: str, argument: str) -> dict[str, object]:
    process = subprocess.run(
        [sys.executable, "-c", program, argument],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert process.returncode == 0, process.stderr
    report: dict[str, object] = json.loads(process.stdout.splitlines()[-1])
    return report


@pytest.mark.parametrize("place", [pytest.param("memory", marks=pytest.mark.slow), "nvme"])
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_was_not(tmp_path: Path, place: str) -> None:
    report = report_of(tmp_path, place, 4, 20261122)
    assert report["same"]
    assert report["resumed at"], "it began anew: nothing was saved"
    assert report["left"] == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_is_killed_fifty_times(tmp_path: Path, place: str, seed: int) -> None:
    assert report_of(tmp_path, place, 50, seed)["same"]


@pytest.mark.slow
def test_saves_and_loads_take_windows_and_no_more_memory(tmp_path: Path) -> None:
    """Of 400 MB: 24 MiB of windows in a save, three readers of 12 MiB in a load, and a few MiB of heap."""
    rises = ran(MEMORY, str(tmp_path))
    assert all(int(str(rise)) < 48 << 20 for rise in rises.values()), rises
