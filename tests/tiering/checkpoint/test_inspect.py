"""``tiering inspect``: what it says of checkpoints that are whole, of damaged ones, and of what is none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tiering.checkpoint.saving import RUN, write_checkpoint
from tiering import cli
from tiering.checkpoint.directory import CheckpointDirectory
from tiering.checkpoint.integrity import damages
from tiering.checkpoint.manifest import LATEST, MANIFEST, Manifest, StoredParameter
from tiering.checkpoint.reader import open_checkpoint
from tiering.config.training import IoConfig
from tiering.storage.arena import PAGE
from tiering.weights.reader import WINDOW_BYTES
from tiering.weights.tensor_file import Output

Inspect = Callable[..., tuple[int, str, str]]

SHAPES: Mapping[str, tuple[int, ...]] = {
    "layers.0.weight": (3, 1000),
    "layers.1.weight": (1500,),
    "bias": (7,),
}
WEIGHTS_2 = "weights-00002-of-00002.safetensors"


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """global_step100 of one rank and global_step200, the latest, of two."""
    directory = CheckpointDirectory(tmp_path_factory.mktemp("inspected") / "checkpoints")
    with Output(IoConfig(engine="threads")) as output:
        for number, ranks in ((100, 1), (200, 2)):
            partial = directory.begin(f"global_step{number}", run=RUN)
            write_checkpoint(partial, number, output, shapes=SHAPES, ranks=ranks)
            directory.commit(partial, f"global_step{number}", run=RUN)
    directory.close()
    return directory.path


@pytest.fixture
def checkpoints(saved: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Inspect:
    """``tiering inspect`` with arguments: (exit code, standard output, standard error), in 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        code = cli.main(["inspect", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def report_of(inspect: Inspect, *arguments: str | Path) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(inspect(*arguments, "--json")[1])
    assert answer["schema_version"] == answer["schema"] == 1
    return answer


def flip(file: Path, *places: int) -> None:
    content = bytearray(file.read_bytes())
    for place in places:
        content[place] ^= 1
    file.write_bytes(content)


# What is whole


def test_a_directory_and_its_latest_checkpoint(checkpoints: Path, inspect: Inspect) -> None:
    code, out, err = inspect(checkpoints)
    assert (code, err) == (0, "")
    lines = [line.rstrip() for line in out.splitlines()]
    assert lines[0] == f"Checkpoints in {checkpoints}"
    rows = [line.split() for line in lines[3:5]]
    assert [(row[0], row[1], row[6:]) for row in rows] == [
        ("global_step100", "100", []),
        ("global_step200", "200", ["latest"]),
    ]
    assert "global_step200: step 200, saved 2026-11-22T08:00:00+00:00 by 2 ranks, Lion in bf16" in lines
    assert "weights  3 F32        4,507  17.61 KiB" in lines
    assert "exp_avg  3 F32        4,507  17.61 KiB" in lines
    assert any(line.startswith("Complete: ") and "every page matches its checksum" in line for line in lines)
    assert "Plan to load it here and continue training (tiering plan has more options):" in lines
    config = json.loads(out[out.index("\n{") :])
    assert config["optimizer"] == {"type": "Lion"}


def test_all_that_is_known_as_json(checkpoints: Path, inspect: Inspect) -> None:
    partial = CheckpointDirectory(checkpoints)
    (partial.begin("global_step300", run=RUN) / "weights").write_bytes(bytes(5000))
    partial.close()
    answer = report_of(inspect, checkpoints)
    listing = answer["directory"]
    assert [(each["tag"], each["step"], each["damage"]) for each in listing["checkpoints"]] == [
        ("global_step100", 100, None),
        ("global_step200", 200, None),
    ]
    assert listing["latest"] == "global_step200" and listing["lost"] is None
    assert [*listing["partials"].values()] == [5000]
    sizes = {file.name: file.stat().st_size for file in (checkpoints / "global_step200").iterdir()}
    checkpoint = answer["checkpoint"]
    assert checkpoint["bytes"] == listing["checkpoints"][1]["bytes"] == sum(sizes.values())
    checked = {
        name: size for name, size in sizes.items() if name.endswith("tensors") and "checksums" not in name
    }
    assert checkpoint["bytes_checked"] == sum(checked.values())
    assert checkpoint["whole"] is True and checkpoint["damage"] == []
    assert checkpoint["kinds"] == {
        "weights": {"dtypes": {"F32": 3}, "bytes": 4 * 4507},
        "exp_avg": {"dtypes": {"F32": 3}, "bytes": 4 * 4507},
    }
    about = checkpoint["about"]
    assert about.pop("files") == {name: size for name, size in sizes.items() if name != MANIFEST}
    assert about == {
        "save": Manifest.read(checkpoints / "global_step200").save,
        "step": 200,
        "created": "2026-11-22T08:00:00+00:00",
        "world_size": 2,
        "optimizer": "Lion",
        "precision": "bf16",
        "parameters": 3,
        "elements": 4507,
        "trained_elements": 4507,
        "excluded_parameters": 0,
        "excluded_elements": 0,
    }


def test_what_a_checkpoint_excludes(checkpoints: Path, inspect: Inspect) -> None:
    path = checkpoints / "global_step100"
    manifest = Manifest.read(path)
    (path / MANIFEST).unlink()
    base = {f"base.{index}": StoredParameter((1000, 1000), "BF16", False, 0) for index in range(3)}
    replace(manifest, excluded=base).write(path)
    code, out, _ = inspect(path)
    assert code == 0
    assert (
        "are excluded, 3 of 3,000,000 elements, the first base.0: the model that loads it must have them"
        in out
    )
    about = report_of(inspect, path)["checkpoint"]["about"]
    assert (about["elements"], about["excluded_parameters"], about["excluded_elements"]) == (4507, 3, 3000000)
    (path / MANIFEST).unlink()
    rest = {name: each for name, each in manifest.parameters.items() if name != "bias"}
    replace(
        manifest, parameters=rest, excluded={"bias": replace(manifest.parameters["bias"], trained=False)}
    ).write(path)
    code, out, _ = inspect(path)
    assert code == 1 and "weights of 'bias', which checkpoint.json does not list" in out


@pytest.mark.parametrize("how", ["path", "tag"])
def test_one_checkpoint_alone(checkpoints: Path, inspect: Inspect, how: str) -> None:
    (checkpoints / LATEST).write_text("gone")  # which is none of its business
    where = [checkpoints / "global_step100"] if how == "path" else [checkpoints, "--tag", "global_step100"]
    code, out, _ = inspect(*where)
    assert code == 0
    assert out.startswith(
        "global_step100: step 100, saved 2026-11-22T08:00:00+00:00 by 1 rank, Lion in bf16\n"
    )
    assert report_of(inspect, *where)["directory"] is None


def test_without_latest_it_is_the_newest(checkpoints: Path, inspect: Inspect) -> None:
    (checkpoints / LATEST).unlink()
    answer = report_of(inspect, checkpoints)
    assert answer["directory"]["latest"] is None
    assert answer["checkpoint"]["about"]["step"] == 200


def test_what_reads_a_checkpoint_leaves_it_alone(checkpoints: Path, inspect: Inspect) -> None:
    before = {file: file.stat().st_mtime_ns for file in checkpoints.rglob("*")}
    inspect(checkpoints)
    assert {file: file.stat().st_mtime_ns for file in checkpoints.rglob("*")} == before


def test_it_answers_without_torch(saved: Path) -> None:
    code = (
        "import sys; from tiering.cli import main; code = main(['inspect', sys.argv[1]]);"
        " print(code, 'torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(saved)], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "0 False"
    assert ran.stderr == ""  # no progress where nobody looks
    assert "\x1b" not in ran.stdout


# What is damaged


def test_each_flipped_byte_is_found_and_named(checkpoints: Path, inspect: Inspect) -> None:
    path = checkpoints / "global_step200"
    begins = {part.name: part.offset for part in open_checkpoint(path).weights.parts["layers.1.weight"]}
    assert begins == {"layers.1.weight": PAGE + 4 * 1500}  # on the second page of both ranks
    flip(path / WEIGHTS_2, PAGE, PAGE + 4 * 1500 + 1, 2 * PAGE)
    flip(path / "rank-00001-of-00002.safetensors", PAGE + 3)
    code, out, _ = inspect(checkpoints)
    assert code == 1
    assert "Plan to load it" not in out
    assert out.splitlines()[-4:] == [
        "Damaged, in 3 places:",
        "  rank-00001-of-00002.safetensors, page 1 (buffer): CRC32C mismatch",
        f"  {WEIGHTS_2}, page 1 (layers.0.weight): CRC32C mismatch",
        f"  {WEIGHTS_2}, page 2 (layers.0.weight, layers.1.weight): CRC32C mismatch",
    ]
    answer = report_of(inspect, checkpoints)
    assert answer["loading"] is None
    assert answer["checkpoint"]["damage"][1] == {
        "file": WEIGHTS_2,
        "page": 1,
        "tensors": ["layers.0.weight"],
        "what": "CRC32C mismatch",
    }


def test_a_quick_look_reads_no_page(checkpoints: Path, inspect: Inspect) -> None:
    flip(checkpoints / "global_step200" / WEIGHTS_2, PAGE)
    code, out, _ = inspect(checkpoints, "--quick")
    assert code == 0
    assert "Without --quick, all checksums are compared, too." in out
    assert report_of(inspect, checkpoints, "--quick")["checkpoint"]["bytes_checked"] == 0


def test_a_file_of_many_windows(tmp_path: Path) -> None:
    """Each page is compared with its own sum, also of what does not fill the last window, or the last page."""
    with Output(IoConfig(engine="threads")) as output:
        write_checkpoint(
            tmp_path, 7, output, shapes={"page": (PAGE // 4,), "big": (2 * WINDOW_BYTES // 4 + 476,)}
        )
    file = tmp_path / "exp_avg-00001-of-00001.safetensors"
    size = file.stat().st_size
    read: list[int] = []
    assert list(damages(open_checkpoint(tmp_path), read.append)) == []
    assert sum(read) == sum(each.stat().st_size for each in tmp_path.glob("[ewr]*.safetensors"))
    places = [PAGE, 2 * PAGE, WINDOW_BYTES - 1, WINDOW_BYTES, 2 * WINDOW_BYTES + PAGE, size - 1]
    flip(file, *places)
    assert [(each.file, each.page, each.names) for each in damages(open_checkpoint(tmp_path))] == [
        (file, place // PAGE, ("page",) if place == PAGE else ("big",)) for place in places
    ]


def test_a_damaged_file_of_checksums_is_no_good_either(checkpoints: Path, inspect: Inspect) -> None:
    file = checkpoints / "global_step200" / "checksums-00002-of-00002.safetensors"
    whole = file.read_bytes()
    flip(file, PAGE)
    code, out, _ = inspect(checkpoints)
    assert code == 1
    assert "Damaged, in 1 place:" in out
    assert "checksums-00002-of-00002.safetensors: CRC32C mismatch in page 1" in out
    file.write_bytes(whole)
    flip(file, len(whole) - 1)
    code, out, _ = inspect(checkpoints)
    assert code == 1
    assert "the SHA-256 of its checksums differs from checkpoint.json" in out


def test_what_is_missing_or_cut_off_is_named_file_by_file(checkpoints: Path, inspect: Inspect) -> None:
    path = checkpoints / "global_step200"
    size = (path / WEIGHTS_2).stat().st_size
    os.truncate(path / WEIGHTS_2, size - 1)
    (path / "exp_avg-00001-of-00002.safetensors").unlink()
    code, out, _ = inspect(checkpoints, "--quick")
    assert code == 1
    assert "global_step200: step 200" in out
    assert sorted(out.splitlines()[-2:]) == [
        "  exp_avg-00001-of-00002.safetensors: it cannot be read: No such file or directory",
        f"  {WEIGHTS_2}: it has {size - 1} bytes, not {size}",
    ]
    answer = report_of(inspect, checkpoints)
    assert [each["step"] for each in answer["directory"]["checkpoints"]] == [100, None]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (MANIFEST, "its content does not match its crc32"),
        ("rank-00002-of-00002.json", "its SHA-256 differs from checkpoint.json"),
    ],
)
def test_damaged_json(checkpoints: Path, inspect: Inspect, name: str, damage: str) -> None:
    file = checkpoints / "global_step200" / name
    file.write_text(file.read_text().replace("200", "201", 1))
    code, out, _ = inspect(checkpoints)
    assert code == 1
    assert f"{file} is damaged: {damage}" in out


def test_a_number_too_large_in_one_record_leaves_the_others(checkpoints: Path, inspect: Inspect) -> None:
    record = checkpoints / "global_step100" / MANIFEST
    record.write_text(record.read_text().replace('"step": 100', '"step": 1e999', 1))
    (checkpoints / LATEST).unlink()
    code, out, _ = inspect(checkpoints)
    assert code == 1
    assert f"Damaged: {record} is damaged: '1e999' is too large for a number" in out
    assert "Complete: " in out
    assert CheckpointDirectory(checkpoints).find() == checkpoints / "global_step200"
    converted = checkpoints.parent / "converted"
    assert cli.main(["convert", str(checkpoints), str(converted)]) == 0
    assert (converted / "model.safetensors").is_file()


def test_a_record_that_is_damaged_is_listed_and_another_programs_is_not(
    checkpoints: Path, inspect: Inspect
) -> None:
    whole = [each["tag"] for each in report_of(inspect, checkpoints)["directory"]["checkpoints"]]
    record = checkpoints / whole[0] / MANIFEST
    record.write_bytes(record.read_bytes()[:-100])
    (checkpoints / "thesis").mkdir()
    (checkpoints / "thesis" / MANIFEST).write_text('{"of": "another program"}')
    code, out, _ = inspect(checkpoints, "--json")
    listed = {each["tag"]: each["damage"] for each in json.loads(out)["directory"]["checkpoints"]}
    assert code == 1
    assert listed.keys() == set(whole)
    assert [tag for tag, damage in listed.items() if damage and "is damaged" in damage] == [whole[0]]


def test_a_damaged_header(checkpoints: Path, inspect: Inspect) -> None:
    flip(checkpoints / "global_step200" / WEIGHTS_2, 8)
    code, out, _ = inspect(checkpoints)
    assert code == 1
    assert f"{WEIGHTS_2} is damaged: CRC32C mismatch in page 0 of its header" in out


def test_a_damaged_tag_beside_a_whole_one(checkpoints: Path, inspect: Inspect) -> None:
    (checkpoints / "global_step100" / "weights-00001-of-00001.safetensors").unlink()
    code, out, _ = inspect(checkpoints)
    assert code == 1
    assert "Complete: " in out
    assert out.count("damaged") >= 1 and "Damaged: " in out


def test_a_latest_that_is_gone(checkpoints: Path, inspect: Inspect) -> None:
    (checkpoints / LATEST).write_text("global_step300")
    code, out, _ = inspect(checkpoints)
    assert code == 1
    assert f"No checkpoint to resume from: {checkpoints / LATEST} names 'global_step300'" in out
    answer = report_of(inspect, checkpoints)
    assert answer["checkpoint"] is None and "names 'global_step300'" in answer["directory"]["lost"]


def test_what_strangers_wrote_does_not_reach_the_terminal(
    checkpoints: Path, inspect: Inspect, tmp_path: Path
) -> None:
    path = tmp_path / "strange"
    path.mkdir()
    name = "layers.0.\x1b[2J"
    with Output(IoConfig(engine="threads")) as output:
        write_checkpoint(path, 7, output, shapes={name: (5,)})
    flip(path / "weights-00001-of-00001.safetensors", PAGE)
    code, out, _ = inspect(path)
    assert code == 1
    assert "page 1 ('layers.0.\\x1b[2J'): CRC32C mismatch" in out
    assert "\x1b" not in out


# What is no checkpoint


def test_what_is_no_checkpoint(checkpoints: Path, inspect: Inspect, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for arguments, why in [
        ([tmp_path / "nowhere"], "is not a directory; name a checkpoint or a directory of checkpoints"),
        ([checkpoints / LATEST], "is not a directory"),
        ([checkpoints.parent], f"name a checkpoint or a directory of checkpoints, for example {checkpoints}"),
        ([tmp_path / "empty"], "holds no checkpoint: no directory with a checkpoint.json"),
        (
            [checkpoints, "--tag", "no"],
            "no checkpoint 'no'; existing checkpoints: 'global_step100', 'global_step200'",
        ),
        ([checkpoints, "--tag", "../x"], "invalid tag '../x'"),
        (
            [checkpoints / "global_step100", "--tag", "x"],
            "is a checkpoint, not a directory of checkpoints; remove --tag",
        ),
    ]:
        code, out, err = inspect(*arguments)
        assert (code, out) == (2, "")
        assert why in err


@pytest.mark.parametrize(("size", "why"), [("many", "invalid size"), ("24", "did you mean 24GiB?")])
def test_a_gpu_of_no_size(
    inspect: Inspect, checkpoints: Path, capsys: pytest.CaptureFixture[str], size: str, why: str
) -> None:
    with pytest.raises(SystemExit) as refused:
        inspect(checkpoints, "--gpu", size)
    assert refused.value.code == 2 and why in capsys.readouterr().err


# What it takes to load it: the rest is in test_load_plan.py


def test_a_model_that_does_not_fit_gets_remedies(
    inspect: Inspect, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiering.placement.budgets.host_memory", lambda: (1 << 12, 0))
    code, out, _ = inspect(checkpoints)
    assert code == 0  # it is whole
    assert "It cannot be loaded here. [TIER-PLAN]" in out
    assert "Each of these changes makes it fit:\n  - " in out
    loading = report_of(inspect, checkpoints)["loading"]
    assert loading["fits"] is False and loading["remedies"]


def test_what_cannot_be_planned_says_why(
    inspect: Inspect, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("this machine has no /dev/shm")
    monkeypatch.chdir("/dev/shm")
    code, out, _ = inspect(checkpoints)
    assert code == 0
    assert "The memory to load it here cannot be planned: [TIER-SPACE] nvme_path /dev/shm is on tmpfs" in out
    assert report_of(inspect, checkpoints)["loading"]["problem"].startswith("[TIER-SPACE]")
