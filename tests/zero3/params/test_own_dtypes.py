"""Frozen parameters that are no floats of 16 bits or more: their bytes live on tiers, in their own dtype."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import tiering
from tests.fakes.fake_device import FakeDevice
from tests.fakes.gpu.streams import never
from tests.zero3.frozen_bytes import FrozenModel, frozen_model
from tiering.checkpoint.conversion import to_checkpoint, to_weights
from tiering.checkpoint.reader import open_checkpoint
from tiering.config.fields import format_size
from tiering.errors import CheckpointError, ConfigError, EngineStateError, SwapError, WeightsError
from tiering.placement.group_sizes import QUANTUM
from tiering.placement.workload import Tier
from tiering.storage.aio import AioContext, Fault, FaultPlan
from tiering.storage.arena import Arena
from tiering.storage.swap_space import SwapSpace
from tiering.weights.files import open_weights
from zero3.checkpoint import rank_share
from zero3.deepspeed.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from zero3.device import tiers
from zero3.params.precision import keeps_dtype

Start = Callable[..., Any]
Differing = Callable[..., list[str]]
STREAMED: dict[str, Any] = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}
IN_PLACE: dict[str, Any] = {}
WHERE = pytest.mark.parametrize(
    "where", [pytest.param(IN_PLACE, id="device", marks=pytest.mark.slow), pytest.param(STREAMED, id="nvme")]
)
NAME = "blocks.1.up.codes"


def kept(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: values for name, values in weights.items() if keeps_dtype(values)}


def step(engine: Any, micro_batches: Callable[..., Any], seed: int = 7) -> float:
    ((tokens, targets),) = micro_batches(1, seed)
    loss = engine(tokens, targets)
    engine.backward(loss)
    engine.step()
    return float(loss.item())


def test_the_plan_counts_their_bytes_once(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """As many bytes as they have, in the frozen group of their block, and no gradients or optimizer state."""
    with caplog.at_level("INFO"):
        engine = start(frozen_model(), threshold=0, **STREAMED)
    model = frozen_model()
    packed = sum(p.nbytes for p in model.parameters() if p.dtype is torch.uint8)
    assert f"{format_size(packed)} of torch.uint8" in caplog.text
    plan = engine.plan
    by_name = dict(zip((group.name for group in plan.workload.groups), plan.param_tiers, strict=True))
    sizes = {group.name: group for group in plan.workload.groups}
    for number, block in enumerate(model.blocks):
        trained = sum(p.numel() for p in block.parameters() if p.requires_grad)
        fixed = sum(
            p.nbytes if keeps_dtype(p) else 2 * p.numel() for p in block.parameters() if not p.requires_grad
        )
        own, frozen = f"blocks.{number}", f"blocks.{number} (frozen)"
        assert by_name[own] is by_name[frozen] is Tier.NVME
        assert trained <= sizes[own].trainable_numel < trained + 2 * QUANTUM
        assert sizes[own].param_bytes == 2 * sizes[own].trainable_numel
        padding = 256 * len(list(block.parameters())) + 2 * QUANTUM
        assert sizes[frozen].trainable_numel == 0
        assert fixed <= sizes[frozen].param_bytes < fixed + padding


@WHERE
def test_values_can_be_read_and_changed(start: Start, where: dict[str, Any]) -> None:
    engine = start(frozen_model(), threshold=0, **where)
    param, before = engine.module.get_parameter(NAME), frozen_model().get_parameter(NAME)
    assert param.dtype is torch.uint8 and param.shape == before.shape and not param.requires_grad
    with tiering.gathered(param) as codes:
        assert torch.equal(codes, before)
    with (
        pytest.raises(EngineStateError, match=f"{NAME!r} was changed without modify=True"),
        tiering.gathered(param) as codes,
    ):
        codes.add_(1)
    with tiering.gathered(param, modify=True) as codes:
        assert torch.equal(codes, before)
        codes[3:5] = torch.tensor([250, 3])
    expected = before.clone()
    expected[3:5] = torch.tensor([250, 3])
    assert torch.equal(engine.state_dict()[NAME], expected)
    assert torch.equal(engine.get_fp32_parameter(NAME), expected)
    engine.module.load_state_dict({NAME: before}, strict=False)
    assert torch.equal(engine.state_dict()[NAME], before)
    with (
        pytest.raises(EngineStateError, match=f"{NAME!r}.*has dtype torch.float32"),
        tiering.gathered(param, modify=True) as codes,
    ):
        codes.data = codes.float()
    with pytest.raises(ConfigError, match=f"{NAME!r} is torch.uint8 and frozen.*modify=True"):
        engine.set_fp32_parameter(NAME, before.float())
    assert torch.equal(engine.state_dict()[NAME], before)


def test_a_change_in_forward_is_stored(start: Start, micro_batches: Callable[..., Any]) -> None:
    """A layer may count its calls in a parameter: the count is the same wherever it lives."""
    counts = []
    for where in (IN_PLACE, STREAMED):
        model = frozen_model()

        def count(module: nn.Module, _: Any) -> None:
            with torch.no_grad():
                module.order.copy_(module.order.roll(1))

        model.blocks[0].up.register_forward_pre_hook(count)
        engine = start(model, threshold=0, accumulation=1, **where)
        losses = [step(engine, micro_batches) for _ in range(3)]
        counts.append((losses, engine.state_dict()["blocks.0.up.order"].tolist()))
    assert counts[0] == counts[1]
    assert counts[0][1] == frozen_model().blocks[0].up.order.roll(3).tolist()


@WHERE
def test_models_without_memory(start: Start, differing: Differing, where: dict[str, Any]) -> None:
    expected = start(frozen_model(), threshold=0).state_dict()
    torch.manual_seed(11)
    with tiering.zero.Init():
        model = FrozenModel()
    codes = model.get_parameter(NAME)
    assert "resharded" in repr(codes) and codes.dtype is torch.uint8
    with tiering.gathered(codes) as values:
        assert torch.equal(values, expected[NAME])
    assert differing(start(model, threshold=0, **where).state_dict(), expected) == []


@WHERE
def test_weights_are_streamed_in_their_dtype(
    start: Start, tmp_path: Path, differing: Differing, where: dict[str, Any]
) -> None:
    built = frozen_model()
    # A tied tensor is stored once.
    stored = {name: values for name, values in built.state_dict().items() if name != "head.weight"}
    save_file(stored, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = FrozenModel()
    engine = start(model, threshold=0, weights=tmp_path / "model.safetensors", **where)
    assert differing(kept(engine.state_dict()), kept(built.state_dict())) == []
    assert engine.state_dict()["embedding.weight"].dtype is torch.bfloat16
    other = stored | {NAME: torch.zeros(built.get_parameter(NAME).shape)}
    save_file(other, tmp_path / "float.safetensors")
    with pytest.raises(WeightsError, match=f"{NAME!r} is F32 and should be torch.uint8"):
        start(frozen_model(), weights=tmp_path / "float.safetensors")


def test_checkpoints_and_exports(
    start: Start,
    tmp_path: Path,
    differing: Differing,
    micro_batches: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # So that a part of a group is saved at a time.
    monkeypatch.setattr(rank_share, "CHUNK", QUANTUM)
    engine = start(frozen_model(), threshold=0, accumulation=1, **STREAMED)
    step(engine, micro_batches)
    engine.save_checkpoint(tmp_path / "run", tag="one")
    saved = engine.state_dict()
    after = step(engine, micro_batches)

    torch.manual_seed(5)
    other = start(FrozenModel(), threshold=0, accumulation=1, offload_param="cpu")
    other.load_checkpoint(tmp_path / "run")
    assert differing(other.state_dict(), saved) == []
    assert step(other, micro_batches) == after

    stored = load_file(engine.save_16bit_model(tmp_path / "export"))
    assert differing(kept(stored), kept(saved)) == []
    assert (
        stored.keys() == saved.keys() - {"head.weight"} and stored["embedding.weight"].dtype is torch.bfloat16
    )

    in_fp32 = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "run")
    assert differing(kept(in_fp32), kept(saved)) == []
    assert in_fp32["blocks.0.norm.weight"].dtype is torch.float32
    to_weights(open_checkpoint(tmp_path / "run" / "one"), tmp_path / "converted", "bf16")
    assert differing(kept(load_file(tmp_path / "converted" / "model.safetensors")), kept(saved)) == []

    to_checkpoint(open_weights(tmp_path / "export" / "model.safetensors"), tmp_path / "from weights")
    last = start(FrozenModel(), threshold=0)
    last.load_checkpoint(tmp_path / "from weights")
    assert differing(kept(last.state_dict()), kept(saved)) == []

    model = frozen_model()
    model.blocks[1].up.codes = nn.Parameter(model.blocks[1].up.codes.view(torch.int8), requires_grad=False)
    with pytest.raises(CheckpointError, match=f"{NAME!r} is U8 and should be torch.int8"):
        start(model, threshold=0).load_checkpoint(tmp_path / "run")


def test_a_released_model_has_them(start: Start, differing: Differing) -> None:
    engine = start(frozen_model(), threshold=0, **STREAMED)
    model = engine.module
    engine.release()
    assert differing(kept(model.state_dict()), kept(frozen_model().state_dict())) == []
    assert differing(kept(start(model, threshold=0).state_dict()), kept(model.state_dict())) == []


def test_a_frozen_float8_parameter_is_kept_and_a_trained_one_is_cast(start: Start) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(torch.float8_e4m3fn)
    model[0].requires_grad_(False)
    weights = start(model).state_dict()
    assert weights["0.weight"].dtype is torch.float8_e4m3fn
    assert weights["1.weight"].dtype is torch.bfloat16


def test_patterns_of_keep_fp32_leave_them_alone(start: Start) -> None:
    engine = start(frozen_model(), threshold=0, keep_fp32=["blocks.1"], **STREAMED)
    weights = engine.state_dict()
    assert weights["blocks.1.up.a"].dtype is torch.float32
    assert torch.equal(weights[NAME], frozen_model().get_parameter(NAME))


def test_a_teacher_of_bytes_computes_without_an_optimizer(
    start: Start, micro_batches: Callable[..., Any]
) -> None:
    """Only codes and frozen floats, with nothing that trains, on NVMe."""
    ((tokens, targets),) = micro_batches(1)
    losses = []
    for where in (IN_PLACE, {"offload_param": "nvme", "cache_in_host": False}):
        engine = start(frozen_model().requires_grad_(False), rule=None, threshold=0, **where)
        with torch.no_grad():
            losses.append([engine(tokens, targets).item() for _ in range(2)])
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", [{"offload_param": "cpu", "offload_optimizer": "cpu"}, STREAMED], ids=["host", "nvme"]
)
def test_a_gpu_that_copies_them(
    start: Start, micro_batches: Callable[..., Any], differing: Differing, place: dict[str, Any]
) -> None:
    """The same bits on a device of its own memory, whose copies are queued, and with no copy used too early."""
    # Without square roots and products whose rounding differs there.
    sgd = {"rule": "SGD", "optimizer": {"lr": 0.1}, "threshold": 0, "accumulation": 1, "prefetch": 10**5}

    def trained(**where: Any) -> tuple[list[float], dict[str, Tensor]]:
        engine = start(frozen_model(), **sgd, **where)
        losses = [step(engine, micro_batches, seed) for seed in range(3)]
        weights = engine.state_dict()
        engine.close()
        return losses, weights

    expected = trained()
    with pytest.MonkeyPatch.context() as patch, FakeDevice(never) as gpu:
        gpu.run_engines(patch)
        outcome = trained(**place, device_budget="8MiB")
    assert outcome[0] == expected[0]
    assert differing(outcome[1], expected[1]) == []


def test_codes_do_not_decide_the_precision() -> None:
    """Most of the model is frozen float8; what computes is bf16, and so is what "auto" chooses."""
    model = nn.Sequential(nn.Linear(64, 64).to(torch.float8_e4m3fn).requires_grad_(False), nn.Linear(64, 2))
    model[1].bfloat16()
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW"},
        "tiering": {"device_budget": "16MiB", "host_budget": "64MiB", "telemetry": {"enabled": False}},
    }
    with tiering.initialize(model=model, config=settings).engine as engine:
        assert engine.settings.precision == "bf16"
        assert engine.state_dict()["0.weight"].dtype is torch.float8_e4m3fn


def frozen_base() -> nn.Module:
    """5 MiB of codes in the block of an adapter with a few elements."""
    base = nn.Linear(4, 4)
    base.codes = nn.Parameter(torch.arange(5 << 20).to(torch.uint8), requires_grad=False)
    return nn.Sequential(base, nn.Linear(4, 4))


@pytest.mark.parametrize("trains", [True, False])
def test_a_base_moves_in_large_pieces_though_little_is_trained(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trains: bool
) -> None:
    """Staging slots are as small as what is trained: 4 KiB here."""
    written, read = list[int](), list[int]()
    swap_out, swap_in = SwapSpace.swap_out, SwapSpace.swap_in

    def written_by(swap: SwapSpace, extent: Any, source: Any, **options: Any) -> Any:
        written.append(source.nbytes)
        return swap_out(swap, extent, source, **options)

    def read_by(swap: SwapSpace, extent: Any, target: Any, **options: Any) -> Any:
        read.append(target.nbytes)
        return swap_in(swap, extent, target, **options)

    monkeypatch.setattr(SwapSpace, "swap_out", written_by)
    monkeypatch.setattr(SwapSpace, "swap_in", read_by)
    base = frozen_base() if trains else frozen_base().requires_grad_(False)
    options: dict[str, Any] = {} if trains else {"rule": None}
    engine = start(base, threshold=0, offload_param="nvme", cache_in_host=False, **options)
    assert engine.plan.staging.slot_bytes == 4096
    requests = 6 + 4 * len(engine.plan.workload.groups)
    assert sum(written) >= 5 << 20 and len(written) < requests
    assert torch.equal(engine.state_dict()["0.codes"], frozen_base()[0].codes)
    assert sum(read) >= 5 << 20 and len(read) < requests
    read.clear()
    stored = load_file(engine.save_16bit_model(tmp_path))
    assert torch.equal(stored["0.codes"], frozen_base()[0].codes)
    assert sum(read) >= 5 << 20 and len(read) < requests


def test_a_disk_that_fails_while_a_base_is_written_ends_initialize(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows: list[Arena] = []
    map_arena = Arena.map

    def seen(nbytes: int, name: str, *rest: Any, **options: Any) -> Arena:
        arena = map_arena(nbytes, name, *rest, **options)
        windows.extend([arena] if name == "filling" else [])
        return arena

    monkeypatch.setattr(Arena, "map", seen)

    def failing(**options: Any) -> AioContext:
        return AioContext(fault=FaultPlan((Fault("write", first=2, error=errno.EIO),)), **options)

    monkeypatch.setattr(tiers, "AioContext", failing)
    with pytest.raises(SwapError, match="EIO"):
        start(frozen_base(), threshold=0, offload_param="nvme", cache_in_host=False)
    assert [arena.used for arena in windows] == [0]
