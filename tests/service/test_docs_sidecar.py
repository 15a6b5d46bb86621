"""docs/tools/sidecar.md: its commands run, its units are units, and it knows every code of advice and every path."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from service.app import create_app
from service.cli import options_of
from service.http import DEFAULT_PORT
from service.watch import Watch

from .processes import Training, tierd
from .test_advice import CASES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tools" / "sidecar.md").read_text(encoding="utf-8")
EXAMPLES = ROOT / "examples" / "sidecar"


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def shape(line: str) -> object:
    """What a line of output shares with another of the same command: keys and types, or words without figures."""

    def of(value: object) -> object:
        if isinstance(value, dict):
            return {key: of(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [of(entry) for entry in value]
        if value is None or isinstance(value, int | float):
            return "figure"  # null in a second in which nothing was published
        return type(value).__name__

    try:
        return of(json.loads(line))
    except json.JSONDecodeError:
        return re.sub(r"[0-9.]+", "N", line)


def test_the_commands_for_json_answer_as_is_printed_there(training: Training) -> None:
    if not (shutil.which("curl") and shutil.which("jq")):
        pytest.skip("no curl, or no jq")
    examples = re.findall(r"^\$ (curl .*)\n(.*)$", section("JSON"), re.MULTILINE)
    assert len(examples) >= 9
    with tierd(training.directory) as sidecar:
        (run,) = sidecar.get("/v1/runs")["runs"]
        for command, printed in examples:
            command = command.replace("gpt-19m-07fe539b", run["id"]).replace("curl -sN", "timeout 1 curl -sN")
            done = subprocess.run(
                ["bash", "-c", f"U={sidecar.url}; {command}"], capture_output=True, text=True, timeout=30
            )
            assert (done.returncode, done.stderr) == (0, ""), command
            if "warnings" not in command:  # there may be none
                assert shape(done.stdout.partition("\n")[0]) == shape(printed), command


def test_every_path_is_told(directory: Path) -> None:
    paths = create_app(Watch(directory)).openapi()["paths"]
    assert len(paths) > 10
    assert [path for path in paths if f"`{path.replace('{run_id}', 'ID')}`" not in PAGE] == []


def test_every_code_of_advice_is_told() -> None:
    codes = {
        code
        for row in re.findall(r"^\| (`.*?`) \|", section("Advice"), re.MULTILINE)
        for code in row.split("`")[1::2]
    }
    assert codes == {case[0] for case in CASES}
    sources = "".join(
        source.read_text(encoding="utf-8") for source in (ROOT / "service" / "advice").glob("*.py")
    )
    in_code = set(re.findall(r'(?:error|warning|info)\(\s*"([a-z-]+)"', sources))
    assert in_code <= codes
    assert len(in_code) > 15


@pytest.mark.parametrize("name", ["tierd-user.service", "tierd.service"])
def test_units_are_units(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"(../../examples/sidecar/{name})" in PAGE
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    program = shutil.which("true") or "/bin/true"
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    text, changed = re.subn(r"(?m)^(ExecStart=)\S*/tierd$", rf"\g<1>{program}", text)
    assert changed == 1
    (tmp_path / "tierd.service").write_text(text)
    scope = ["--user"] if "%h" in text else ["--system"]
    done = subprocess.run(
        ["systemd-analyze", *scope, "verify", str(tmp_path / "tierd.service")], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_pod_starts_what_there_is(directory: Path) -> None:
    assert "(../../examples/sidecar/pod.yaml)" in PAGE
    pod = yaml.safe_load((EXAMPLES / "pod.yaml").read_text(encoding="utf-8"))
    training, sidecar = pod["spec"]["containers"]
    assert training["env"] == sidecar["env"] and training["volumeMounts"] == sidecar["volumeMounts"]
    assert options_of(sidecar["command"][1:]).expect_ranks == 8
    for probe, path in (("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
        program, flag, source = sidecar[probe]["exec"]["command"]
        assert (program, flag, f"'http://127.0.0.1:{DEFAULT_PORT}{path}'" in source) == ("python", "-c", True)
        compile(source, probe, "exec")
