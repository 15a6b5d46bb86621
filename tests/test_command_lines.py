"""Common behaviour of tiering, tierbench and tierd: a version, suggestions, and output that cannot be written."""

from __future__ import annotations

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


def test_a_result_has_one_format(tmp_path: Path) -> None:
    done = ran(f"tierbench {tmp_path} --json --csv")
    assert done.returncode == 2 and "not allowed with argument" in done.stderr


def test_a_run_directory_that_is_named_has_to_be_there(tmp_path: Path) -> None:
    for line in (f"tierd --once --dir {tmp_path}/no", f"tierd --port 0 --dir {tmp_path}/no/run"):
        done = ran(line)
        assert done.returncode == 2 and f"--dir {tmp_path}/no" in done.stderr
