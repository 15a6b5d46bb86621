"""Common behaviour of tiering, tierbench and tierd: a version, suggestions, and output that cannot be written."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

MODULES = {"tiering": "tiering.cli", "tierbench": "tiering.tierbench.cli", "tierd": "service.cli"}
PLAN = "plan --params 350M --gpu 24GiB --host-budget 8GiB --nvme-budget 1TB"


def ran(line: str, end: str = "") -> subprocess.CompletedProcess[str]:
    """Run a line that begins with one of ``MODULES``; ``end`` redirects or pipes its output."""
    program, _, arguments = line.partition(" ")
    shell = f"{sys.executable} -m {MODULES[program]} {arguments} {end}"
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {shell}"], capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("program", MODULES)
def test_a_version_is_printed(program: str) -> None:
    done = ran(f"{program} --version")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(rf"{program} \d+\.\d+\S*\n", done.stdout)


@pytest.mark.parametrize(
    ("line", "command"), [("tiering chekc x", "check"), ("tierbench tnue x", "tune"), ("tierd onec", "once")]
)
def test_a_mistyped_command_is_named(line: str, command: str, tmp_path: Path) -> None:
    done = ran(line)
    assert done.returncode == 2 and done.stderr.rstrip().endswith(f"did you mean {command}?")


@pytest.mark.parametrize("line", [f"tiering {PLAN}", f"tiering {PLAN} --json", "tierd dashboard"])
def test_output_that_nobody_reads_or_that_cannot_be_written(line: str) -> None:
    closed = ran(line, "| true")
    assert closed.returncode in (0, 141) and "Traceback" not in closed.stderr
    full = ran(line, "> /dev/full")
    assert full.returncode == 2 and "cannot be written: No space left on device" in full.stderr
    assert "Traceback" not in full.stderr


@pytest.mark.parametrize("module", MODULES.values())
def test_a_press_of_tab_runs_no_command(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    with pytest.raises(SystemExit, match="1"):
        importlib.import_module(module).main(["--nonsense"])


@pytest.mark.parametrize(
    ("line", "completion"),
    [("tiering insp", "inspect"), ("tierbench tune --write-c", "--write-config"), ("tierd stack", "stacks")],
)
def test_a_shell_completes_commands_and_options(line: str, completion: str, tmp_path: Path) -> None:
    pytest.importorskip("argcomplete", reason="the extra 'completion' is not installed")
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    output = tmp_path / "completions"
    command = [sys.executable, "-m", MODULES[line.split()[0]]]
    environment = os.environ | asked | {"_ARGCOMPLETE_STDOUT_FILENAME": str(output)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert output.read_text().split() == [completion]


def test_a_result_has_one_format(tmp_path: Path) -> None:
    done = ran(f"tierbench {tmp_path} --json --csv")
    assert done.returncode == 2 and "not allowed with argument" in done.stderr


def test_a_run_directory_that_is_named_has_to_be_there(tmp_path: Path) -> None:
    for line in (f"tierd --once --dir {tmp_path}/no", f"tierd --port 0 --dir {tmp_path}/no/run"):
        done = ran(line)
        assert done.returncode == 2 and f"--dir {tmp_path}/no" in done.stderr
