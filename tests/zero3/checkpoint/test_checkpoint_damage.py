"""What a load meets in files: damage is named, what is another model's refused, and the good one is loaded."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import tiering
from tests.tiering.checkpoint.mutations import Mutations
from tests.tiering.checkpoint.older import as_version_1
from tests.zero3.checkpoints import SETTINGS, Start, begin
from tests.zero3.resuming import STREAMED, Left, Model, train
from tiering.errors import CheckpointError, TieringError
from zero3.engine.engine import Engine


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two checkpoints of a run, "good" and "bad"; each test takes a copy."""
    from tests.zero3.conftest import config

    directory = tmp_path_factory.mktemp("damage")
    os.environ["TIERING_DEVICE"] = "cpu"
    torch.manual_seed(1)
    with tiering.initialize(model=Model(), config=config(directory, **SETTINGS)).engine as engine:
        train(engine, range(2))
        engine.save_checkpoint(directory, "good")
        train(engine, range(1))
        engine.save_checkpoint(directory, "bad", client_state={"tensor": torch.arange(3000)})
    return directory


@pytest.fixture
def spoilt(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


def refused(start: Start, spoilt: Path, match: str, **options: Any) -> None:
    """The bad one is refused, and the good one is loaded afterwards, and trains."""
    engine = begin(start, **options)
    with pytest.raises(CheckpointError, match=match):
        engine.load_checkpoint(spoilt, "bad")
    engine.load_checkpoint(spoilt, "good")
    train(engine, range(1))
    engine.close()


FILES = [
    f"{kind}-00001-of-00001.safetensors" for kind in ("weights", "exp_avg", "exp_avg_sq", "rank", "checksums")
]
JSON = ["checkpoint.json", "rank-00001-of-00001.json"]


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", FILES + JSON)
def test_a_file_that_is_gone_cut_or_flipped_is_named(start: Start, spoilt: Path, name: str) -> None:
    file = spoilt / "bad" / name
    content = file.read_bytes()
    refuse = {name: lambda: refused(start, spoilt, name)}[name]
    if name == "checkpoint.json":
        file.unlink()
        refused(start, spoilt, "has no checkpoint 'bad'")
    else:
        file.unlink()
        refuse()
    for cut in (0, 7, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:cut])
        refuse()
    file.write_bytes(content + b"\0" * 4096)
    refuse()
    for place in (0, 9, 60, len(content) // 2, len(content) - 3):
        flipped = bytearray(content)
        flipped[place] ^= 1
        file.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=r"bad/[a-z]"):
            begin(start).load_checkpoint(spoilt, "bad")


@pytest.mark.parametrize("name", FILES + JSON)
def test_a_file_of_another_save_is_named(start: Start, spoilt: Path, name: str) -> None:
    shutil.copyfile(spoilt / "good" / name, spoilt / "bad" / name)
    refused(start, spoilt, r"bad/[a-z_]+-00001-of-00001.*: files of two saves are mixed in this directory")


def test_a_checkpoint_of_version_1_loads_to_the_bit(
    start: Start, spoilt: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    as_version_1(spoilt / "bad", spoilt / "older")
    outcomes = []
    for tag in ("bad", "older"):
        assert "has no digests" not in caplog.text
        engine = begin(start)
        engine.load_checkpoint(spoilt, tag)
        outcomes.append(Left.by(engine, train(engine, range(1))))
    assert outcomes[1].differences(outcomes[0]) == []
    assert f"{spoilt / 'older'} has format version 1, which has no digests" in caplog.text


def test_the_parameter_in_whose_bytes_a_bit_has_flipped_is_named(start: Start, spoilt: Path) -> None:
    from safetensors import safe_open

    for kind, name in (
        ("weights", "blocks.0.0.weight"),
        ("exp_avg", "table.weight"),
        ("exp_avg_sq", "blocks.1.3.weight"),
    ):
        file = spoilt / "bad" / f"{kind}-00001-of-00001.safetensors"
        content = file.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        begins, ends = header[name]["data_offsets"]
        flipped = bytearray(content)
        flipped[8 + length + (begins + ends) // 2] ^= 16
        file.write_bytes(flipped)
        with safe_open(file, "pt") as read:  # nobody else sees it
            read.get_tensor(name)
        refused(start, spoilt, rf"{kind}-00001.*'{name}' is damaged: CRC32C mismatch in bytes \d+ to \d+")
        refused(start, spoilt, rf"{kind}-00001.*'{name}' is damaged: CRC32C mismatch", **STREAMED)
        file.write_bytes(content)


def test_another_model_or_optimizer_is_refused_before_anything_changes(
    start: Start, spoilt: Path, tmp_path: Path
) -> None:
    class Wider(Model):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(70, 32)
            self.head.weight = self.table.weight

    def unchanged(engine: Engine, match: str, **options: Any) -> None:
        before = Left.by(engine)
        with pytest.raises(CheckpointError, match=match):
            engine.load_checkpoint(spoilt, "bad", **options)
        assert Left.by(engine).differences(before) == []
        train(engine, range(1))

    unchanged(
        begin(start, Wider),
        r"of another model: .*'table.weight' is \[60, 32\] and should be \[70, 32\]",
    )
    unchanged(
        begin(start, rule="Lion", optimizer={"lr": 1e-4}),
        r"of AdamW? \(exp_avg, exp_avg_sq\).*Lion \(exp_avg\)",
    )

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        trained = [param for param in model.parameters() if param.requires_grad]
        return [{"params": trained[:3]}, {"params": trained[3:]}]

    model = Model()
    engine = start(model, model_parameters=groups(model), **SETTINGS)
    unchanged(engine, "1 param groups?, but the optimizer has 2")
    engine = begin(start, rule="Lion", optimizer={"lr": 1e-4})
    engine.load_checkpoint(spoilt, "bad", load_optimizer_states=False)
    train(engine, range(1))


def test_another_schedule_is_refused_by_name(start: Start, tmp_path: Path, nvme: Path) -> None:
    from tests.zero3.conftest import config

    def scheduled(make: Callable[[Any], Any]) -> Engine:
        return tiering.initialize(model=Model(), config=config(nvme, **SETTINGS), lr_scheduler=make).engine

    with scheduled(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2)) as engine:
        engine.save_checkpoint(tmp_path / "saved")
    with scheduled(
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    ) as engine:
        with pytest.raises(CheckpointError, match=r"schedul.*LambdaLR.*load_lr_scheduler_states=False"):
            engine.load_checkpoint(tmp_path / "saved")
        engine.load_checkpoint(tmp_path / "saved", load_lr_scheduler_states=False)
        train(engine, range(1))


def sealed(content: Any) -> bytes:
    """As a stranger would write it who knows the sum."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return json.dumps({"crc32": f"{zlib.crc32(text.encode()):08x}", "content": content}).encode()


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.text(max_size=8)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=8) | st.sampled_from(["$tensor", "$tuple", "$dict", "$size"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*path, key))


def rewritten(directory: Path, name: str, path: tuple[Any, ...], value: Any) -> None:
    """Put ``value`` at ``path`` of the content of a JSON file, and let all sums and sizes agree with it."""
    file, record = directory / name, directory / "checkpoint.json"
    content = {"root": json.loads(file.read_bytes())["content"]}
    inner: Any = content
    for key in ("root", *path)[:-1]:
        inner = inner[key]
    inner[("root", *path)[-1]] = value
    file.write_bytes(sealed(content["root"]))
    if file != record:
        manifest = json.loads(record.read_bytes())["content"]
        manifest["files"][name] = file.stat().st_size
        manifest["digests"][name] = hashlib.sha256(file.read_bytes()).hexdigest()
        record.write_bytes(sealed(manifest))


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        (("engine",), None, "engine of the checkpoint is a NoneType"),
        (("engine", "micro_steps"), None, r"engine\['micro_steps'\] of the checkpoint is a NoneType"),
        (("engine", "steps"), [3], r"engine\['steps'\] of the checkpoint is a list"),
        (
            ("engine", "steps"),
            2**61,
            r"engine\['steps'\] of the checkpoint is 2305843009213693952, not a count",
        ),
        (("engine", "steps"), -1, r"engine\['steps'\] of the checkpoint is -1, not a count"),
        (("engine", "skipped"), 1.5, r"engine\['skipped'\] of the checkpoint is 1.5, not a count"),
        (("engine", "loss_scale", "clean"), -3, r"\['clean'\] of the checkpoint is -3, not a count"),
        (("engine", "loss_scale", "value"), 0, r"\['value'\] of the checkpoint is 0, not a loss scale"),
        (
            ("engine", "loss_scale", "value"),
            {"$float": "nan"},
            r"\['value'\] of the checkpoint is nan, not a loss scale",
        ),
        (("engine", "loss_scale"), {}, r"engine\['loss_scale'\] of the checkpoint has no 'dynamic'"),
        (("param_groups",), {}, "param_groups of the checkpoint is a dict"),
        (("param_groups", 0), 3, r"param_groups\[0\] of the checkpoint is a int"),
        (
            ("param_groups", 0, "options", "lr"),
            "x",
            r"param_groups\[0\]\['options'\]\['lr'\] of the checkpoint is a str",
        ),
        (("param_groups", 0, "options", "lr"), None, r"\['lr'\] of the checkpoint is a NoneType"),
        (("param_groups", 0, "options", "betas"), [1.0, 1.0], "cannot be used: .*beta1 must be"),
        (("param_groups", 0, "names", 0), [3], r"a name in param_groups\[0\] of the checkpoint is a list"),
        (("extra_state",), 3, "extra_state of the checkpoint is a int"),
        (("client_state",), [3], "client_state of the checkpoint is a list"),
        (("random",), 3, "the random states are a int"),
        (("buffers",), ["none"], "it has no buffer 'none'"),
        (("client_state",), {"$tensor": "none"}, "client_state has '.tensor', but 'none' is unknown"),
    ],
    ids=str,
)
def test_what_no_run_has_said_is_refused(
    start: Start, spoilt: Path, path: tuple[Any, ...], value: Any, match: str
) -> None:
    rewritten(spoilt / "bad", "rank-00001-of-00001.json", path, value)
    refused(start, spoilt, match)


def test_a_checkpoint_from_before_samples_were_counted(start: Start, spoilt: Path) -> None:
    name = "rank-00001-of-00001.json"
    counters = json.loads((spoilt / "bad" / name).read_bytes())["content"]["engine"]
    engine = begin(start)
    each = engine.train_batch_size()
    assert counters["samples"] == 3 * each
    rewritten(spoilt / "bad", name, ("engine", "samples"), 1000)  # updates were of another size
    engine.load_checkpoint(spoilt, "bad")
    assert engine.global_samples == 1000
    del counters["samples"]
    rewritten(spoilt / "bad", name, ("engine",), counters)
    engine.load_checkpoint(spoilt, "bad")
    assert engine.global_samples == 3 * each


@pytest.mark.parametrize("name", JSON)
def test_a_digit_that_was_changed_in_json_is_found(start: Start, spoilt: Path, name: str) -> None:
    file = spoilt / "bad" / name
    content = file.read_bytes()
    changed = content.replace(b'"steps": 3', b'"steps": 2')
    assert changed != content
    file.write_bytes(changed)
    refused(start, spoilt, f"{name} is damaged: (its content does not match its crc32|its SHA-256 differs)")


@pytest.mark.slow
@pytest.mark.parametrize("name", JSON)
def test_hostile_json_is_refused_and_the_engine_goes_on(
    saved: Path, tmp_path: Path, start: Start, name: str
) -> None:
    shutil.copytree(saved, tmp_path / "copy")
    directory = tmp_path / "copy"
    file = directory / "bad" / name
    whole = file.read_bytes()
    engine = begin(start)
    where = list(places(json.loads(whole)["content"]))

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.sampled_from(where), VALUES)
    def hostile(path: tuple[Any, ...], value: Any) -> None:
        file.write_bytes(whole)
        rewritten(directory / "bad", name, path, value)
        try:
            engine.load_checkpoint(directory, "bad")
        except TieringError:
            engine.load_checkpoint(directory, "good")
        train(engine, range(1))

    hostile()


def assert_edits_found_or_harmless(start: Start, saved: Path, tmp_path: Path, count: int, seed: int) -> int:
    """Loads either name the damage or give the bits that were saved; returns how many have found some."""
    directory = tmp_path / "edited"
    shutil.copytree(saved, directory)
    engine, refusals = begin(start), 0
    engine.load_checkpoint(directory, "bad")
    expected = Left.by(engine)
    mutations = Mutations(saved / "bad", saved / "good", seed, ranks=1)
    for number in range(count):
        done = mutations.apply(directory / "bad", number)
        try:
            engine.load_checkpoint(directory, "bad")
        except CheckpointError:
            refusals += 1
            continue
        differences = Left.by(engine).differences(expected)
        assert set(differences) <= {"norm"}, f"seed {seed}, {done}: {differences}"
    engine.load_checkpoint(directory, "good")
    return refusals


def test_edits_are_found_or_load_to_the_bit(start: Start, saved: Path, tmp_path: Path) -> None:
    assert assert_edits_found_or_harmless(start, saved, tmp_path, 30, seed=3) > 20


@pytest.mark.slow
def test_hundreds_of_edits_are_found_or_load_to_the_bit(start: Start, saved: Path, tmp_path: Path) -> None:
    refusals = assert_edits_found_or_harmless(start, saved, tmp_path, 600, seed=4)
    print(refusals)
    assert refusals > 500
