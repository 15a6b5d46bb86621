"""``tiering migrate``: the imports of a script change, nothing else does, and missing names are told."""

from __future__ import annotations

import difflib
import importlib
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiering
from tiering.cli import main
from tiering.commands.deepspeed_imports import Source
from tiering.errors import ConfigError

Migrate = Callable[..., tuple[int, str, str]]


@pytest.fixture
def migrate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Migrate:
    """Exit code, stdout and stderr of ``tiering migrate`` for these arguments, without the directory's name."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["migrate", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out.replace(f"{tmp_path}/", ""), err.replace(f"{tmp_path}/", "")

    return run


def changed(text: str) -> str:
    return Source(text.encode()).rewritten().decode()


STATEMENTS = {
    "import deepspeed": "import tiering as deepspeed",
    "import deepspeed as ds": "import tiering as ds",
    "import  deepspeed ,torch": "import  tiering as deepspeed ,torch",
    "import deepspeed.comm": "import tiering.comm, tiering as deepspeed",
    "import deepspeed.comm as dist": "import tiering.comm as dist",
    "import os, deepspeed.ops.adam, deepspeed as d": "import os, tiering.ops.adam, tiering as deepspeed, tiering as d",
    "from deepspeed import zero, comm as dist": "from tiering import zero, comm as dist",
    "from deepspeed.ops.adam import (FusedAdam,)": "from tiering.ops.adam import (FusedAdam,)",
    "from deepspeed.utils import *": "from tiering.utils import *",
    "from\tdeepspeed . ops import adam": "from\ttiering . ops import adam",
    "import deepspeed_utils, deepspeedy.x": "import deepspeed_utils, deepspeedy.x",
    "from .deepspeed import x": "from .deepspeed import x",
    "from . import deepspeed": "from . import deepspeed",
    "from transformers import deepspeed": "from transformers import deepspeed",
    "x = 'import deepspeed'": "x = 'import deepspeed'",
    '"""from deepspeed import z"""': '"""from deepspeed import z"""',
}
ENDS = ["", " ", "  # type: ignore", "; import os", " ;x = 1  # import deepspeed"]


@pytest.mark.parametrize("statement", STATEMENTS)
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("end", ENDS)
def test_only_the_import_changes(statement: str, newline: str, end: str) -> None:
    frame = "# déjà \x0c import deepspeed{n}if True:{n}\t'é'; {s}{e}{n}\tpass{n}{n}# deepspeed"
    before = frame.format(n=newline, s=statement, e=end)
    assert changed(before) == frame.format(n=newline, s=STATEMENTS[statement], e=end)


@given(st.lists(st.tuples(st.sampled_from([*STATEMENTS]), st.sampled_from(ENDS)), max_size=8), st.booleans())
def test_a_second_run_changes_nothing(lines: list[tuple[str, str]], crlf: bool) -> None:
    text = ("\r\n" if crlf else "\n").join(f"{statement}{end}" for statement, end in lines)
    once = changed(text)
    assert changed(once) == once
    # What changed is in lines that have an import of deepspeed.
    lines_before, lines_after = text.splitlines(), once.splitlines()
    for tag, first, last, *_ in difflib.SequenceMatcher(None, lines_before, lines_after).get_opcodes():
        assert tag == "equal" or all("deepspeed" in line for line in lines_before[first:last])


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_an_import_over_several_lines(newline: str) -> None:
    lines = [
        *("from \\", "  \\", "    {}.ops.adam import (  # both", "    FusedAdam,", ")"),
        *("import \\", " {}"),
    ]
    text = newline.join(lines)
    assert changed(text.format("deepspeed", "deepspeed")) == text.format("tiering", "tiering as deepspeed")


def test_the_changed_script_has_the_names_that_it_had() -> None:
    names: dict[str, object] = {}
    script = """
import deepspeed.comm
import deepspeed.ops.adam as adam
from deepspeed import zero
def late():
    import deepspeed as ds
    from deepspeed.ops.adam import FusedAdam
    return ds, FusedAdam
imported = deepspeed.comm, adam, zero, *late()
"""
    exec(changed(script), names)
    assert names["deepspeed"] is tiering
    adam = tiering.ops.adam
    assert names["imported"] == (tiering.comm, adam, tiering.zero, tiering, adam.FusedAdam)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "latin-1", "utf-8"])
def test_a_file_keeps_its_encoding_its_mode_and_its_link(
    tmp_path: Path, migrate: Migrate, encoding: str
) -> None:
    real, link = tmp_path / "real.py", tmp_path / "train.py"
    cookie = f"# -*- coding: {encoding} -*-\r\n" if encoding == "latin-1" else "\r\n"
    real.write_bytes((cookie + "import deepspeed  # é").encode(encoding))
    real.chmod(0o750)
    link.symlink_to(real)
    assert migrate(link) == (0, "train.py: 1 import changed\n", "")
    assert real.read_bytes() == (cookie + "import tiering as deepspeed  # é").encode(encoding)
    assert link.is_symlink() and stat.S_IMODE(real.stat().st_mode) == 0o750
    assert set(tmp_path.iterdir()) == {real, link}, "nothing is left beside it"


SCRIPT = """import deepspeed
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param
from deepspeed.pipe import PipelineModule
from deepspeed.utils import safe_get_full_grd
from deepspeed.comm.comm import isend, all_reduce

def build(layer: MoE, kinds=(int,)) -> MoE:
    note: MoE = layer
    if isinstance(layer, MoE):
        layer = MoE(8)
    return layer

class Pipe(PipelineModule):
    engine.offload_states(include=None)
deepspeed.zero.DeepSpeedZeRoOffload(2, 2)
deepspeed.zero.Init, deepspeed.comm.isend, deepspeed.ops.adam.FusedAdam.step, deepspeed.__version__
importlib.import_module("deepspeed.comm")
importlib.metadata.version("deepspeed"), version("torch")
"""
PROBLEMS = [
    "5: deepspeed.utils.safe_get_full_grd does not exist here",
    "11: deepspeed.moe.layer.MoE is not supported; use an ordinary model with experts",
    "14: deepspeed.pipe.PipelineModule is not supported; pass the layers to `initialize`",
    "15: engine.offload_states is not supported; remove it",
    "16: deepspeed.zero.DeepSpeedZeRoOffload is not supported; remove it",
    "18: import_module('deepspeed.comm') is not changed; write 'tiering.comm'",
    "19: version('deepspeed') is not changed; write 'tiering'",
]


def test_what_is_missing_is_told_where_it_is_used(tmp_path: Path, migrate: Migrate) -> None:
    """Imports that nothing uses, annotations and tests of a type are no problem."""
    importlib.import_module("tiering.moe.layer")  # a placeholder does not count as a module that exists
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    for _ in range(2):  # the changed script has the same problems
        code, out, err = migrate(script)
        lines = [line for line in out.splitlines() if "changed" not in line or "is not" in line]
        assert (code, err, len(lines)) == (0, "", len(PROBLEMS))
        for line, start in zip(lines, PROBLEMS, strict=True):
            assert line.startswith(f"train.py:{start}")


def test_check_and_diff_change_no_file(tmp_path: Path, migrate: Migrate) -> None:
    script = tmp_path / "train.py"
    script.write_text("import deepspeed")
    assert migrate(script, "--check") == (1, "train.py: 1 import would change\n", "")
    code, out, _ = migrate(script, "--diff")
    assert code == 0
    assert out.splitlines() == [
        *("--- train.py", "+++ train.py", "@@ -1 +1 @@"),
        *("-import deepspeed", "\\ No newline at end of file"),
        *("+import tiering as deepspeed", "\\ No newline at end of file"),
        "train.py: 1 import would change",
    ]
    assert migrate(script, "--diff", "--check")[0] == 1
    assert script.read_text() == "import deepspeed"
    assert migrate(script)[0] == 0 and migrate(script, "--check") == (0, "", "")
    script.write_text("import tiering as deepspeed\ndeepspeed.init_inference(model)")
    assert migrate(script, "--check")[0] == 1 and migrate(script)[0] == 0


def test_files_that_are_no_python_stay(tmp_path: Path, migrate: Migrate) -> None:
    good, wrong = tmp_path / "a" / "good.py", tmp_path / "a" / "old.py"
    good.parent.mkdir()
    good.write_text("import deepspeed\n")
    wrong.write_text("import deepspeed\nprint 'old'\n")
    code, out, err = migrate(tmp_path / "a", tmp_path / "missing.py")
    assert (code, out) == (2, "a/good.py: 1 import changed\n")
    assert err.splitlines()[0].startswith(
        "tiering migrate: a/old.py: cannot be parsed as Python: line 2: Missing parentheses"
    )
    assert err.splitlines()[0].endswith("; it is left unchanged")
    assert err.splitlines()[1] == "tiering migrate: missing.py: No such file or directory"
    assert wrong.read_text() == "import deepspeed\nprint 'old'\n"


@pytest.mark.parametrize(
    "content", [b"import deepspeed\n\xff", b"# coding: nothing\nimport deepspeed", b"\0", b"(" * 5000 + b"1"]
)
def test_content_that_cannot_be_parsed_is_told(content: bytes) -> None:
    with pytest.raises(ConfigError, match="cannot be parsed as Python"):
        Source(content)


def test_a_file_that_cannot_be_replaced_stays(
    tmp_path: Path, migrate: Migrate, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import deepspeed")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert migrate(script) == (2, "", "tiering migrate: train.py: No space left on device\n")
    assert [*tmp_path.iterdir()] == [script] and script.read_text() == "import deepspeed"


def test_the_table_of_replacements(migrate: Migrate, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = migrate("--table")
    assert (code, err) == (0, "")
    assert "PipelineModule, PipelineEngine" in out and "\n    start the script by `tiering launch`" in out
    assert max(map(len, out.splitlines())) <= 100
    with pytest.raises(SystemExit):
        main(["migrate"])
    assert "give a FILE, or --table" in capsys.readouterr().err


def test_it_loads_no_torch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    code = "import sys; from tiering.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "migrate", "--check", str(tmp_path / "train.py")]
    assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0
