"""Prometheus' own tool, which lints metrics and checks and tests rules."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def promtool(*arguments: str | Path, stdin: str = "") -> None:
    """Run it, and fail with what it complains about; skip where it is not installed."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: package prometheus)")
    done = subprocess.run(["promtool", *arguments], input=stdin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
