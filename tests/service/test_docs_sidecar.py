"""docs/sidecar.md: its commands run, its units are units, and it knows every code of advice and every path."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from service.app import create_app
from service.watch import Watch

from .processes import Training, tierd
from .test_advice import CASES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "sidecar.md").read_text(encoding="utf-8")
EXAMPLES = ROOT / "examples" / "sidecar"


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_commands_for_json_say_something_of_a_run(training: Training) -> None:
    if not (shutil.which("curl") and shutil.which("jq")):
        pytest.skip("no curl, or no jq")
    commands = [line[2:] for line in section("JSON").splitlines() if line.startswith("$ curl")]
    assert len(commands) >= 9
    with tierd(training.directory) as sidecar:
        (run,) = sidecar.get("/v1/runs")["runs"]
        for command in commands:
            command = command.replace("gpt-19m-07fe539b", run["id"])
            if "/v1/events" in command:
                command = command.replace("curl", "timeout 1 curl")
            done = subprocess.run(
                ["bash", "-c", f"U={sidecar.url}; {command}"], capture_output=True, text=True, timeout=30
            )
            assert (done.returncode, done.stderr) == (0, ""), command
            assert done.stdout or "warnings" in command, command


def test_every_path_is_told(directory: Path) -> None:
    paths = create_app(Watch(directory)).openapi()["paths"]
    assert len(paths) > 10
    assert [path for path in paths if f"`{path.replace('{run_id}', 'ID')}`" not in PAGE] == []


def test_every_code_of_advice_is_told() -> None:
    told = {
        code
        for row in re.findall(r"^\| (`.*?`) \|", section("Advice"), re.MULTILINE)
        for code in row.split("`")[1::2]
    }
    assert told == {case[0] for case in CASES}
    said = "".join(
        source.read_text(encoding="utf-8") for source in (ROOT / "service" / "advice").glob("*.py")
    )
    in_code = set(re.findall(r'(?:error|warning|info)\(\s*"([a-z-]+)"', said))
    assert in_code <= told
    assert len(in_code) > 15


@pytest.mark.parametrize("name", ["tierd-user.service", "tierd.service"])
def test_units_are_units(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"(../examples/sidecar/{name})" in PAGE
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
    """Its probes ask the two paths for probes; its command line is one that tierd takes."""
    assert "(../examples/sidecar/pod.yaml)" in PAGE
    training, sidecar = yaml.safe_load((EXAMPLES / "pod.yaml").read_text(encoding="utf-8"))["spec"][
        "containers"
    ]
    assert training["env"] == sidecar["env"] and training["volumeMounts"] == sidecar["volumeMounts"]
    with tierd(directory, *sidecar["command"][1:]) as one:
        for probe, code in (("livenessProbe", 0), ("readinessProbe", 1)):
            command = [
                part.replace("http://127.0.0.1:8471", one.url) for part in sidecar[probe]["exec"]["command"]
            ]
            done = subprocess.run([sys.executable, *command[1:]], capture_output=True, text=True)
            assert done.returncode == code, "eight ranks are expected, and none is there"
