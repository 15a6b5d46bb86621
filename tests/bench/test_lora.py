"""bench_lora.py runs, and names every side."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "bench_lora.py"


@pytest.mark.slow
def test_every_side_is_timed_and_one_row_is_compared_with_the_roof() -> None:
    command = [
        sys.executable,
        str(SCRIPT),
        "--size",
        "256",
        "--inputs",
        "1",
        "20",
        "--rounds",
        "2",
        "--threads",
        "1",
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    for inputs in (1, 20):
        times = dict(re.findall(rf"^ +{inputs} rows  (\w+) +([\d.]+) ms", done.stdout, re.MULTILINE))
        assert {"nf4", "int8", "fp8", "dense"} <= times.keys()
        assert all(float(time) >= 0 for time in times.values())
    shares = re.findall(r"^one row  (\w+) .*: ([\d.]+) of the lower$", done.stdout, re.MULTILINE)
    assert [name for name, _ in shares] == ["nf4", "int8", "fp8"]
    assert ("bitsandbytes" in dict(re.findall(r"rows  (\w+) +([\d.]+) ms", done.stdout))) != (
        "bitsandbytes is not installed" in done.stdout
    )
