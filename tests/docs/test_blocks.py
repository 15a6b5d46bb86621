"""Every Python and console block of README.md and docs/ runs as written, but for what stand_ins.py declares."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from . import stand_ins
from .blocks import FENCE, PAGES, ROOT, Block, blocks

WITH_CODE = [
    page for page in PAGES if any(block.language in ("python", "sh", "console") for block in blocks(page))
]
TOOLS = ("jq", "promtool", "fio")
PROGRAMS = (
    "tiering",
    "tierbench",
    "tierd",
    "python",
    "torchrun",
    "make",
    "curl",
    "docker",
    "systemctl",
    "srun",
)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logging_as_before: None) -> Path:
    """An empty current directory with a home, a swap directory, and the commands of this source tree in PATH."""
    for name in ("bin", "home", "nvme"):
        (tmp_path / name).mkdir()
    modules = {"tiering": "tiering.cli", "tierbench": "tiering.tierbench.cli", "tierd": "service.cli"}
    for command, module in (modules | {"python": ""}).items():
        start = f"{shlex.quote(sys.executable)} {f'-m {module}' if module else ''}"
        (tmp_path / "bin" / command).write_text(f'#!/bin/sh\nexec {start} "$@"\n')
        (tmp_path / "bin" / command).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    variables = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HOME": str(tmp_path / "home")}
    variables |= {"PYTHONPATH": str(ROOT), "TIERING_RUN_DIR": str(tmp_path / "run"), "TIERING_DEVICE": "cpu"}
    for name, value in (variables | {"COLUMNS": "100", "ROOT": str(ROOT)}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path


def replaced(page: str, text: str) -> str:
    for written, run in stand_ins.REPLACED.get(page, {}).items():
        text = text.replace(written, run)
    return text


@contextlib.contextmanager
def names() -> Iterator[dict[str, Any]]:
    """Those that the blocks of a page share. Engines that a page leaves open are closed."""
    shared: dict[str, Any] = {}
    try:
        yield shared
    finally:
        if (engine := shared.get("engine")) is not None:
            engine.close()


def run_python(block: Block, shared: dict[str, Any]) -> None:
    if block.file_name is not None:
        # A script: commands of the page run it.
        exec(stand_ins.GIVEN.get(block.key, ""), shared)
        return
    exec(stand_ins.GIVEN.get(block.key, ""), shared)
    source = replaced(block.page, block.body)
    exec(compile("\n" * block.line + source, str(PAGES[block.page]), "exec"), shared)
    exec(stand_ins.HOLDS.get(block.key, ""), shared)


def run_in_process_of_its_own(page: str) -> None:
    """Run all Python blocks of the page in one process, which imports the page's library once."""
    source = "\n".join(replaced(page, block.body) for block in blocks(page) if block.language == "python")
    command = [sys.executable, "-W", "ignore", "-c", source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{page}\n{done.stderr}"


def run_command(page: str, command: str, printed: str) -> None:
    key = (page, command)
    shown = stand_ins.RUN_AS.get(key, replaced(page, command))
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", shown],
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    output = done.stdout + done.stderr
    assert done.returncode == stand_ins.EXIT_CODES.get(key, 0), f"{page}: {shown}\n{output}"
    assert "Traceback" not in output, f"{page}: {shown}\n{output}"
    if key in stand_ins.PRINTED:
        assert [line.rstrip() for line in output.splitlines()] == printed.splitlines()


def run_page(page: str, *, slow: bool) -> None:
    """Run the page's blocks in their order, those that are slow if ``slow``."""
    lacking = set()
    for name, text in stand_ins.WRITTEN.get(page, {}).items():
        Path(name).write_text(text, encoding="utf-8")
    for block in blocks(page):
        if block.file_name is not None:
            Path(block.file_name).write_text(replaced(page, block.body), encoding="utf-8")
    if page in stand_ins.OWN_PROCESS:
        run_in_process_of_its_own(page)
    with names() as shared:
        for block in blocks(page):
            if block.key in stand_ins.NOT_RUN or (block.key in stand_ins.SLOW and not slow):
                continue
            if block.language == "python":
                if page not in stand_ins.OWN_PROCESS:
                    run_python(block, shared)
            elif block.language in ("sh", "console"):
                for command, printed in block.commands():
                    key = (page, command)
                    needs = {tool for tool in TOOLS if tool in shlex.split(command) or f"--{tool}" in command}
                    if absent := {tool for tool in needs if shutil.which(tool) is None}:
                        lacking |= absent
                    elif key not in stand_ins.NOT_RUN and (slow or key not in stand_ins.SLOW):
                        run_command(page, command, printed)
    if lacking:
        pytest.skip(f"not installed: {', '.join(sorted(lacking))}; the blocks without these tools have run")


@pytest.mark.parametrize("page", WITH_CODE)
@pytest.mark.usefixtures("scratch")
def test_the_blocks_of_a_page_run(page: str) -> None:
    run_page(page, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({page for page, _ in stand_ins.SLOW}))
@pytest.mark.usefixtures("scratch")
def test_the_blocks_of_a_page_run_with_those_that_take_long(page: str) -> None:
    run_page(page, slow=True)


def test_what_is_declared_is_on_the_pages() -> None:
    every = [block for page in PAGES for block in blocks(page)]
    firsts = {block.key for block in every}
    commands = {
        (block.page, command)
        for block in every
        if block.language in ("sh", "console")
        for command, _ in block.commands()
    }
    python = {block.key for block in every if block.language == "python"}
    assert {*stand_ins.GIVEN, *stand_ins.HOLDS} <= python
    assert {*stand_ins.RUN_AS, *stand_ins.EXIT_CODES, *stand_ins.PRINTED} <= commands
    assert {*stand_ins.SLOW, *stand_ins.NOT_RUN} <= firsts | commands
    assert not {*stand_ins.NOT_RUN} & {*stand_ins.RUN_AS, *stand_ins.SLOW}
    assert all(len(reason) > 10 for reason in stand_ins.NOT_RUN.values())
    for page, changes in stand_ins.REPLACED.items():
        text = "".join(block.body for block in blocks(page))
        assert [written for written in changes if written not in text] == [], page


def test_blocks_of_commands_have_no_output() -> None:
    shown = [block for page in PAGES for block in blocks(page) if block.language == "sh"]
    assert [block.key for block in shown if any(command[0] == "$" for command, _ in block.commands())] == []


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_code_are_fenced(page: str) -> None:
    """An indented block is a drawing, a listing or a part of a configuration: nothing that somebody would run."""
    prose = FENCE.sub("", PAGES[page].read_text(encoding="utf-8"))
    for match in re.finditer(r"(?<=\n\n)(?:    .*\n)+", prose):
        lines = [line[4:] for line in match[0].splitlines()]
        assert lines[0].split()[0] not in ("$", "import", "from", "with", *PROGRAMS), match[0]
        assert not re.match(r"[\w, *]+ = (?!max)\w+(\.\w+)*\(", lines[0]), match[0]
