"""docs/tools/sidecar.md: its commands run, its units are units, and it knows every code of advice and every path."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from service.app import create_app
from service.cli import options_of
from service.http import DEFAULT_PORT
from service.status_files import StatusFiles
from service.watch import Watch
from tiering.telemetry import job_labels

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
        pytest.skip("curl or jq is not installed")
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
    paths = create_app(Watch(StatusFiles(directory))).openapi()["paths"]
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


@pytest.mark.parametrize("name", ["tierd-user.service", "tierd.service", "tierd-all-users.service"])
def test_units_are_units(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"(../../examples/sidecar/{name})" in PAGE
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    program = shutil.which("true") or "/bin/true"
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    text, changed = re.subn(r"(?m)^(ExecStart=)\S*/tierd\b", rf"\g<1>{program}", text)
    assert changed == 1
    if "--all-users" in text:
        # They would hide /run/user and /tmp, where runs publish.
        assert not re.search(r"(?m)^(ProtectHome=(yes|tmpfs)|PrivateTmp=yes)", text)
    (tmp_path / "tierd.service").write_text(text)
    scope = ["--user"] if "%h" in text else ["--system"]
    done = subprocess.run(
        ["systemd-analyze", *scope, "verify", str(tmp_path / "tierd.service")], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["job.yaml", "jobset.yaml"])
def test_the_pods_start_what_there_is_and_the_monitor_finds_it(name: str) -> None:
    assert f"(../../examples/sidecar/kubernetes/{name})" in PAGE
    (job, monitor, kustomization) = (
        yaml.safe_load((EXAMPLES / "kubernetes" / file).read_text(encoding="utf-8"))
        for file in (name, "podmonitor.yaml", "kustomization.yaml")
    )
    if name == "jobset.yaml":
        job = job["spec"]["replicatedJobs"][0]["template"]
    pod = job["spec"]["template"]
    (sidecar,), (training,) = pod["spec"]["initContainers"], pod["spec"]["containers"]
    # A sidecar that lets the Job complete, with the same files for both.
    assert sidecar["restartPolicy"] == "Always" and pod["spec"]["restartPolicy"] == "Never"
    assert training["env"] == sidecar["env"] and training["volumeMounts"][0] in sidecar["volumeMounts"]
    variables = {variable["name"]: variable for variable in sidecar["env"]}
    assert Path(variables["TIERING_RUN_DIR"]["value"]).parent == Path(
        training["volumeMounts"][0]["mountPath"]
    )
    assert job_labels({}, dict.fromkeys(variables, "x")).keys() == {"pod", "namespace"}
    options = options_of(sidecar["command"][1:])
    (port,) = sidecar["ports"]
    assert (options.host, port["containerPort"]) == ("0.0.0.0", DEFAULT_PORT)
    assert str(options.token_file.parent) in [mount["mountPath"] for mount in sidecar["volumeMounts"]]
    for probe in ("startupProbe", "livenessProbe"):
        assert sidecar[probe]["httpGet"] == {"path": "/livez", "port": port["name"]}
    # Two scrapes read how the run ended.
    assert sidecar["lifecycle"]["preStop"]["sleep"]["seconds"] > 2 * 15
    assert pod["spec"]["terminationGracePeriodSeconds"] > sidecar["lifecycle"]["preStop"]["sleep"]["seconds"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == port["name"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    secrets = {volume["secret"]["secretName"] for volume in pod["spec"]["volumes"] if "secret" in volume}
    assert secrets == {endpoint["authorization"]["credentials"]["name"]}
    assert endpoint["authorization"]["credentials"]["key"] == options.token_file.name
    assert [image["name"] for image in kustomization["images"]] == [training["image"]] == [sidecar["image"]]
    assert all((EXAMPLES / "kubernetes" / resource).is_file() for resource in kustomization["resources"])


def test_the_daemon_set_reads_where_pods_of_all_users_publish() -> None:
    assert "(../../examples/sidecar/kubernetes/daemonset.yaml)" in PAGE
    text = (EXAMPLES / "kubernetes" / "daemonset.yaml").read_text(encoding="utf-8")
    daemon, monitor = (
        yaml.safe_load((EXAMPLES / "kubernetes" / file).read_text(encoding="utf-8"))
        for file in ("daemonset.yaml", "podmonitor.yaml")
    )
    template = daemon["spec"]["template"]
    (sidecar,) = template["spec"]["containers"]
    options = options_of(sidecar["command"][1:])
    (port,) = sidecar["ports"]
    assert options.all_users and (options.host, port["containerPort"]) == ("0.0.0.0", DEFAULT_PORT)
    mounts = {mount["name"]: mount for mount in sidecar["volumeMounts"]}
    assert str(options.token_file.parent) == mounts["tierd-token"]["mountPath"]
    # One of the directories in which run directories of all users are looked for, as the jobs publish there.
    places = {"/var/tmp", "/tmp", "/dev/shm"}
    assert mounts["pages"] == {"name": "pages", "mountPath": "/var/tmp", "readOnly": True}
    assert mounts["pages"]["mountPath"] in places and "value: /var/tmp/tiering-1000}" in text
    (variable,) = sidecar["env"]
    assert Path(variable["value"]).parent == Path(mounts["own"]["mountPath"])
    assert sidecar["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["DAC_READ_SEARCH"]}
    labels = template["metadata"]["labels"]
    assert daemon["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == port["name"]


def test_slurm_puts_the_run_directory_where_root_finds_it() -> None:
    assert "(../../examples/sidecar/slurm-task-prolog.sh)" in PAGE
    printed = subprocess.run(
        [EXAMPLES / "slurm-task-prolog.sh"], capture_output=True, text=True, check=True
    ).stdout
    assert printed == f"export TIERING_RUN_DIR=/var/tmp/tiering-{os.geteuid()}\n"
