"""Frozen weights that are read in place: from the files of the user, the same bits as from anywhere else."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import tiering
from tests.zero3.building.test_loading import save
from tests.zero3.conftest import SmallModel, batches, same_bits
from tests.zero3.frozen_bytes import FrozenModel
from tiering.errors import CheckpointError, EngineStateError, WeightsError
from tiering.host import drives
from tiering.placement.workload import Tier
from tiering.storage import file_system
from zero3.params import flat_storage
from zero3.setup import in_place, model_size

STREAMED: dict[str, Any] = {
    "offload_param": "nvme",
    "offload_optimizer": "nvme",
    "cache_in_host": False,
    "threshold": 64,
}
Start = Callable[..., Any]


class Adapted(SmallModel):
    """A frozen base in bf16, whose down projections are trained."""

    def __init__(self, width: int = 48) -> None:
        super().__init__(width)
        self.to(torch.bfloat16)
        for name, param in self.named_parameters():
            param.requires_grad_("down" in name)


def build(model: Callable[[], nn.Module] = Adapted, seed: int = 31, how: str = "in memory") -> nn.Module:
    torch.manual_seed(seed)
    contexts = {"under Init": tiering.zero.Init, "on meta": lambda: torch.device("meta")}
    with contexts.get(how, nullcontext)():
        return model()


def weights_of(directory: Path, model: nn.Module, dtype: torch.dtype | None = None) -> Path:
    """Shards with the values of ``model``; parameters that training rounds keep their precision."""
    tensors = {name: param.detach() for name, param in model.named_parameters()}
    if dtype is not None:
        frozen = {
            name: values.to(dtype)
            for name, values in tensors.items()
            if not model.get_parameter(name).requires_grad and values.dtype is torch.float32
        }
        tensors |= frozen
    return save(directory, tensors)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return weights_of(tmp_path / "weights", build())


def digests(directory: Path) -> dict[str, tuple[str, int]]:
    return {
        path.name: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(directory.iterdir())
    }


def trained(engine: Any, count: int = 4) -> SimpleNamespace:
    losses = []
    for tokens, targets in batches(count):
        loss = engine(tokens, targets)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return SimpleNamespace(losses=losses, masters=engine.master_state_dict(), weights=engine.state_dict())


def assert_same(first: SimpleNamespace, other: SimpleNamespace) -> None:
    assert first.losses == other.losses
    assert same_bits(first.masters, other.masters) == []
    assert same_bits(first.weights, other.weights) == []


def swapped(engine: Any) -> int:
    """Bytes of parameters that have swap space."""
    planned: int = engine.plan.contents(Tier.NVME).get("parameters", 0)
    return planned


def moving(engine: Any, *, frozen: bool) -> int:
    """Bytes of the groups that move and are frozen, or trained."""
    groups = zip(engine.plan.workload.groups, engine.plan.param_tiers, strict=True)
    return sum(
        group.param_bytes
        for group, tier in groups
        if tier is Tier.NVME and frozen is not (group.trainable_numel > 0)
    )


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({}, "in memory"),
        pytest.param({"prefetch": 0, "device_budget": "300KiB"}, "on meta", marks=pytest.mark.slow),
        pytest.param(
            {"io": {"engine": "threads", "block_size": "4K", "queue_depth": 2}, "verify": True},
            "under Init",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_no_home_changes_a_bit(start: Start, weights: Path, options: dict[str, Any], how: str) -> None:
    before = digests(weights)
    resident = trained(start(build(seed=1), weights=weights))
    copied = start(build(seed=1), weights=weights, weights_in_place=False, **STREAMED)
    assert (copied.plan.in_place_bytes, swapped(copied)) == (
        0, moving(copied, frozen=True) + moving(copied, frozen=False)
    )  # fmt: skip
    assert_same(trained(copied), resident)
    engine = start(build(seed=1, how=how), weights=weights, **STREAMED, **options)
    assert engine.plan.in_place_bytes == moving(engine, frozen=True) > 100_000
    assert swapped(engine) == moving(engine, frozen=False)
    assert_same(trained(engine), resident)
    (files,) = (path for path in engine.snapshot().io if path.path == str(weights))
    assert files.direct and files.written.bytes == 0
    engine.close()
    assert digests(weights) == before


@pytest.mark.slow
def test_frozen_bytes_of_any_dtype(start: Start, tmp_path: Path) -> None:
    model = build(FrozenModel)
    weights = weights_of(tmp_path / "weights", model, torch.bfloat16)
    resident = trained(start(build(FrozenModel, seed=1), weights=weights))
    engine = start(build(FrozenModel, seed=1, how="on meta"), weights=weights, **STREAMED)
    assert engine.plan.in_place_bytes == moving(engine, frozen=True) > 30_000
    assert swapped(engine) == moving(engine, frozen=False)
    assert_same(trained(engine), resident)
    kept = {name: param for name, param in model.named_parameters() if param.dtype is torch.int8}
    assert same_bits({name: engine.state_dict()[name] for name in kept}, kept) == []


def wide() -> Adapted:
    """Rows that the blocks of a quantised format divide."""
    return Adapted(64)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["nf4", "int8", "fp8"])
def test_a_base_that_is_quantised_already(start: Start, tmp_path: Path, form: str) -> None:
    """Codes in the file are read in place; floats that have to be encoded are not."""
    layer = {"quantize": {"type": form, "modules": ["up"], "double_quant": False}}
    source = build(wide)
    floats = weights_of(tmp_path / "floats", source)
    encoded = start(build(wide, seed=1), weights=floats, **STREAMED, **layer)
    values = encoded.state_dict()
    codes = [name for name in values if name.endswith("up.weight")]
    in_place = encoded.plan.in_place_bytes
    assert in_place < moving(encoded, frozen=True)
    weights = save(
        tmp_path / "codes", {name: value for name, value in values.items() if name != "head.weight"}
    )
    read = start(build(wide, seed=1), weights=weights, **STREAMED, **layer)
    assert read.plan.in_place_bytes == moving(read, frozen=True) > in_place
    assert [values[name].dtype for name in codes] == [torch.int8 if form == "int8" else torch.uint8] * 3
    assert_same(trained(read), trained(encoded))


def test_memory_that_fits_is_filled_once(start: Start, weights: Path) -> None:
    options = STREAMED | {"accumulation": 1, "weights": weights}
    resident = trained(start(build(seed=1), weights=weights, accumulation=1))
    least = start(build(seed=1), **options)
    whole = least.plan.in_place_bytes
    trains = least.plan.state_bytes() - whole
    least.close()
    # Room for what is written, and for a part of what is only read.
    options |= {"cache_in_host": True, "host_budget": trains + whole // 2}
    engine = start(build(seed=1), **options)
    assert 0 < engine.plan.in_place_bytes < whole
    assert not swapped(engine)
    read = engine.snapshot().io[-1].read.bytes
    assert_same(trained(engine), resident)
    assert engine.snapshot().io[-1].read.bytes > read
    assert engine.snapshot().io[-1].path == str(weights)


@pytest.mark.slow
def test_storages_that_are_filled_by_a_copy(
    start: Start, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident = trained(start(build(seed=1), weights=weights))
    monkeypatch.setattr(model_size, "can_exchange", lambda: False)
    engine = start(build(seed=1), weights=weights, **STREAMED)
    assert isinstance(engine._groups[0]._storage, flat_storage.CopiedStorage | type(None))
    assert engine.plan.in_place_bytes > 0
    assert_same(trained(engine), resident)


@pytest.mark.slow
def test_what_the_file_has_in_another_dtype_is_copied(start: Start, tmp_path: Path) -> None:
    tensors = {name: param.detach() for name, param in build().named_parameters()}
    tensors["blocks.1.up.weight"] = tensors["blocks.1.up.weight"].float()
    weights = save(tmp_path / "weights", tensors)
    engine = start(build(seed=1), weights=weights, **STREAMED)
    in_files = {group.name: bool(group.in_files) for group in engine.plan.workload.groups}
    assert [in_files[f"blocks.{number} (frozen)"] for number in range(3)] == [True, False, True]
    assert_same(trained(engine), trained(start(build(seed=1), weights=weights)))


@pytest.mark.parametrize("before", ["a pass", "a step"])
def test_a_file_that_changes_ends_training(start: Start, weights: Path, before: str) -> None:
    engine = start(build(), weights=weights, accumulation=1, **STREAMED)
    rows = list(batches(3))
    engine.backward(engine(*rows[0]))
    engine.step()
    if before == "a step":
        engine.backward(engine(*rows[1]))
    masters = engine.master_state_dict()
    changed = weights / "model-00002-of-00003.safetensors"
    with changed.open("ab") as file:
        file.write(b"x")
    expected = rf"TIER-WEIGHTS.*{changed}: it has changed while this run reads.*weights_in_place to false"
    with pytest.raises(WeightsError, match=expected):
        engine.step() if before == "a step" else engine(*rows[1])
    trained_names = [name for name in masters if "down" in name]
    assert same_bits(
        {name: engine.get_fp32_parameter(name) for name in trained_names},
        {name: masters[name] for name in trained_names},
    ) == []  # fmt: skip


def test_a_truncated_shard_is_refused_at_start(start: Start, weights: Path) -> None:
    shard = weights / "model-00003-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(WeightsError, match=rf"{shard}.*truncated"):
        start(build(), weights=weights, **STREAMED)


def test_files_are_not_written(start: Start, weights: Path) -> None:
    before = digests(weights)
    engine = start(build(), weights=weights, **STREAMED)
    param = engine.module.blocks[1].up.weight
    expected = engine.state_dict()["blocks.1.up.weight"].clone()
    with tiering.gathered(param, modify=True):
        pass
    expected_error = r"blocks\.1\.up\.weight.*read in place from.*weights_in_place"
    with (
        pytest.raises(EngineStateError, match=expected_error),
        tiering.gathered(param, modify=True),
        torch.no_grad(),
    ):
        param.view(-1)[7] += 1
    with pytest.raises(EngineStateError, match="never written"), torch.no_grad():
        param.copy_(torch.zeros_like(param))
    with torch.no_grad():
        param.copy_(expected)
    with pytest.raises(CheckpointError, match="cannot be replaced: this run reads frozen weights from it"):
        engine.save_16bit_model(weights)
    engine.save_16bit_model(weights.parent / "export")
    trained_param = engine.module.blocks[1].down.weight
    with tiering.gathered(trained_param, modify=True), torch.no_grad():
        trained_param.zero_()
    assert torch.equal(engine.state_dict()["blocks.1.up.weight"], expected)
    assert not engine.state_dict()["blocks.1.down.weight"].any()
    assert digests(weights) == before


def test_a_file_that_a_link_names_is_not_replaced(start: Start, tmp_path: Path) -> None:
    file, link = tmp_path / "base" / "model.safetensors", tmp_path / "link.safetensors"
    file.parent.mkdir()
    save_file({name: param.detach() for name, param in build().named_parameters()}, file)
    link.symlink_to(file)
    before = digests(file.parent)
    engine = start(build(), weights=link, **STREAMED)
    with pytest.raises(CheckpointError, match=rf"{file} cannot be replaced"):
        engine.save_16bit_model(file.parent)
    # An export replaces a link, and not the file behind it.
    engine.save_16bit_model(tmp_path, save_filename="link.safetensors")
    assert not link.is_symlink() and digests(file.parent) == before


class Editing(Adapted):
    """Its forward changes a frozen weight in place."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        def edit(module: nn.Module, args: Any) -> None:
            with torch.no_grad():
                module.up.weight.view(-1)[5] += 1  # type: ignore[union-attr,operator] # of a Block

        handle = self.blocks[0].register_forward_pre_hook(edit)
        loss = super().forward(tokens, targets)
        handle.remove()
        return loss


def test_an_edit_in_forward_is_refused(start: Start, weights: Path) -> None:
    engine = start(build(Editing), weights=weights, **STREAMED)
    with pytest.raises(EngineStateError, match=r"blocks\.0\.up\.weight.*read in place"):
        trained(engine, 1)


@pytest.mark.slow
def test_checkpoints_have_the_base_and_return_to_it(start: Start, weights: Path, tmp_path: Path) -> None:
    engine = start(build(seed=1), weights=weights, **STREAMED)
    trained(engine, 2)
    engine.save_checkpoint(tmp_path / "run")
    engine.save_16bit_model(tmp_path / "export")
    state = engine.state_dict()
    onward = trained(engine, 4)
    engine.load_checkpoint(tmp_path / "run")
    assert_same(trained(engine, 4), onward)
    elsewhere = start(build(seed=2), **STREAMED)
    elsewhere.load_checkpoint(tmp_path / "run")
    assert same_bits(elsewhere.state_dict(), state) == []
    exported = start(build(seed=2), weights=tmp_path / "export")
    names = [name for name in state if "down" not in name]
    assert same_bits(
        {name: exported.state_dict()[name] for name in names}, {name: state[name] for name in names}
    ) == []  # fmt: skip
    model = engine.module
    engine.release()
    assert same_bits(dict(model.state_dict()), onward.weights) == []


def test_a_checkpoint_with_another_base_is_refused(start: Start, weights: Path, tmp_path: Path) -> None:
    other = start(build(seed=8))
    trained(other, 2)
    other.save_checkpoint(tmp_path / "run")
    other.save_checkpoint(tmp_path / "adapters", exclude_frozen_parameters=True)
    engine = start(build(seed=1), weights=weights, **STREAMED)
    before, masters = engine.state_dict(), engine.master_state_dict()
    with pytest.raises(
        CheckpointError, match=r"other values of '.*'.*nothing was loaded.*weights_in_place to false"
    ):
        engine.load_checkpoint(tmp_path / "run")
    assert same_bits(engine.state_dict(), before) == []
    assert same_bits(engine.master_state_dict(), masters) == []
    engine.load_checkpoint(tmp_path / "adapters")
    loaded = engine.state_dict()
    assert torch.equal(loaded["blocks.0.down.weight"], other.state_dict()["blocks.0.down.weight"])
    assert torch.equal(loaded["blocks.0.up.weight"], before["blocks.0.up.weight"])


@pytest.mark.parametrize("wanted", ["auto", pytest.param(True, marks=pytest.mark.slow)])
def test_without_direct_io_it_is_told(
    start: Start,
    weights: Path,
    wanted: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    resident = trained(start(build(seed=1), weights=weights))
    monkeypatch.setattr(file_system, "_open_direct", lambda path: -1)
    with caplog.at_level(logging.INFO):
        engine = start(build(seed=1), weights=weights, weights_in_place=wanted, **STREAMED)
    if wanted == "auto":
        assert engine.plan.in_place_bytes == 0
        assert "frozen weights are copied to swap space, because the file system of" in caplog.text
    else:
        assert engine.plan.in_place_bytes == moving(engine, frozen=True)
        assert "refuses O_DIRECT: reading it fills the page cache" in caplog.text
        assert "of frozen parameters are read in place from 3 files in" in caplog.text
    assert_same(trained(engine), resident)


@pytest.mark.parametrize(
    ("kind", "disk", "reason"),
    [
        ("network", drives.Drive("sda"), "is on nfs4"),
        ("memory", drives.Drive("sda"), "is on nfs4"),
        ("disk", drives.Drive("sda", rotational=True, transport="sata"), "is on a rotating disk"),
        ("disk", drives.Drive("vda", rotational=True, transport="virtio"), ""),
    ],
)
def test_slow_places_are_copied(
    tmp_path: Path, kind: Any, disk: drives.Drive, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(3)}, file)
    backing = drives.Backing(drives.FileSystem("nfs4", kind, "server", "/", ()), (disk,))
    monkeypatch.setattr(drives, "behind", lambda directory: backing)
    assert in_place._unsuitable([file]) == (f"{tmp_path} {reason}" if reason else "")
