"""Files of two saves never pass for one checkpoint: load, inspect and convert refuse them, and name a file."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.tiering.checkpoint.older import as_version_1, rewrite_json
from tests.tiering.checkpoint.saving import number_of, write_checkpoint
from tiering import cli
from tiering.checkpoint.inspection import inspect
from tiering.checkpoint.manifest import MANIFEST, file_name, read_sealed
from tiering.checkpoint.reader import open_checkpoint
from tiering.config.training import IoConfig
from tiering.errors import CheckpointError
from tiering.weights.tensor_file import Output

RANKS = 3
KINDS = ("weights", "exp_avg", "rank", "checksums")


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two saves of a tag: the same sizes everywhere, and other values."""
    root = tmp_path_factory.mktemp("saves")
    with Output(IoConfig(engine="threads"), windows=4) as output:
        for number in (100, 200):
            (root / str(number)).mkdir()
            write_checkpoint(root / str(number), number, output, ranks=RANKS)
    return root / "100", root / "200"


def mixed(saves: tuple[Path, Path], into: Path, names: set[str]) -> Path:
    """The earlier save, but for the files ``names``, which are those of the later one."""
    earlier, later = saves
    shutil.rmtree(into, ignore_errors=True)
    shutil.copytree(earlier, into)
    for name in names:
        shutil.copyfile(later / name, into / name)
    return into


def assert_refused(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert "files of two saves are mixed in this directory" in message
    assert any(f"{path / name} is damaged:" in message for name in names_of(path)), message
    report = inspect(path)
    assert not report.whole
    assert all("files of two saves are mixed" in damage.problem for damage in report.damage), report.damage
    for arguments in (["inspect", str(path)], ["convert", str(path), str(tmp_path / "converted")]):
        assert cli.main(arguments) == 1
        assert "files of two saves are mixed" in "".join(capsys.readouterr())
    assert not (tmp_path / "converted").exists()


def names_of(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


SINGLE = [
    *(file_name(kind, 1, RANKS) for kind in KINDS),
    file_name("rank", 1, RANKS, "json"),
    MANIFEST,
]


@pytest.mark.parametrize("name", SINGLE)
def test_a_single_file_of_another_save(
    saves: tuple[Path, Path], tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(mixed(saves, tmp_path / "mixed", {name}), tmp_path, capsys)


def test_all_files_of_one_rank(
    saves: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {name for name in names_of(saves[0]) if f"-0000{RANKS}-of" in name}
    assert len(names) == 5
    path = mixed(saves, tmp_path / "mixed", names)
    assert_refused(path, tmp_path, capsys)
    named = {damage.problem.partition(" is damaged: ")[0] for damage in inspect(path).damage}
    assert named == {
        str(path / file_name("checksums", 2, RANKS)),
        str(path / file_name("rank", 2, RANKS, "json")),
    }


def test_a_mirror_by_size_of_a_tag_that_was_saved_again(
    saves: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of `rsync --size-only` and `aws s3 sync --size-only`: what has the size of before is not copied."""
    earlier, later = saves
    longer = {
        name
        for name in names_of(later)
        if (earlier / name).stat().st_size != (later / name).stat().st_size or name.endswith(".json")
    }
    assert longer == {name for name in names_of(later) if name.endswith(".json")}
    assert_refused(mixed(saves, tmp_path / "mixed", longer), tmp_path, capsys)


def test_any_mixture(saves: tuple[Path, Path], tmp_path: Path) -> None:
    choose, names = random.Random(5), names_of(saves[0])
    for _ in range(40):
        chosen = set(choose.sample(names, choose.randrange(1, len(names))))
        path = mixed(saves, tmp_path / "mixed", chosen)
        with pytest.raises(CheckpointError, match="files of two saves are mixed"):
            open_checkpoint(path)
        assert not inspect(path).whole
    assert number_of(mixed(saves, tmp_path / "mixed", set(names))) == 200
    assert number_of(mixed(saves, tmp_path / "mixed", set())) == 100


@pytest.mark.parametrize("kind", ["digests", "files"])
def test_a_record_that_does_not_vouch_for_a_file(saves: tuple[Path, Path], tmp_path: Path, kind: str) -> None:
    path, name = mixed(saves, tmp_path / "mixed", set()), file_name("rank", 1, RANKS, "json")
    content = read_sealed(path / MANIFEST)
    del content[kind][name]
    rewrite_json(path / MANIFEST, content)
    lacking = "it has no digests for the files of rank 1" if kind == "digests" else f"it does not list {name}"
    with pytest.raises(CheckpointError, match=f"checkpoint.json is damaged: {lacking}"):
        open_checkpoint(path)
    assert not inspect(path).whole


def test_a_checkpoint_of_version_1_is_taken_with_a_note(
    saves: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = as_version_1(saves[0], tmp_path / "older")
    checkpoint = open_checkpoint(path)
    assert checkpoint.manifest.save is None
    assert set(checkpoint.weights.tensors) == {"layers.0.weight", "layers.1.weight", "bias"}
    assert len(checkpoint.weights.parts["layers.0.weight"]) == RANKS
    note = "has format version 1, which has no digests"
    assert note in checkpoint.caveat
    assert cli.main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert "Complete: " in out
    assert note in out
    assert cli.main(["convert", str(path), str(tmp_path / "converted")]) == 0
    assert note in capsys.readouterr().err
    assert open_checkpoint(saves[0]).caveat == ""
