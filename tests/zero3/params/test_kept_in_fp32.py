"""A model in 16 bits with parameters that stay fp32: everywhere, to the bit, and as plain PyTorch would train it."""

from __future__ import annotations

import copy
import logging
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
from tests.zero3.conftest import config
from tests.zero3.plain import STREAMED, differing
from tests.zero3.routed import KEEP, WIDTH, Routed, inputs
from tiering.config import ds_config
from tiering.errors import ConfigError
from zero3.params.precision import kept_in_fp32

Start = Callable[..., Any]
PLACEMENTS: dict[str, dict[str, Any]] = {
    "device": {},
    "cpu": {"offload_param": "cpu", "offload_optimizer": "cpu"},
    "nvme": STREAMED,
    "nvme, everything moves": {**STREAMED, "threshold": 0, "prefetch": 0},
    "nvme, small tiles": {**STREAMED, "threshold": 0, "sub_group_size": 2048},
}


def built() -> Routed:
    torch.manual_seed(11)
    return Routed()


def train(engine: Any, steps: int = 3) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    losses = []
    for tokens in inputs(steps * engine.settings.gradient_accumulation_steps):
        loss = engine(tokens)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
        if engine.was_step_applied():
            losses.append(engine.get_global_grad_norm())
    return losses, copy.deepcopy(engine.state_dict()), engine.master_state_dict()


def dtypes(state: dict[str, Tensor]) -> dict[str, torch.dtype]:
    return {name: value.dtype for name, value in state.items()}


@pytest.mark.one_of(3)
@pytest.mark.parametrize("state", ["fp32", "split", "bf16", "split+bf16"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_no_placement_changes_a_bit(start: Start, state: str, accumulation: int) -> None:
    expected: Any = None
    for place, options in PLACEMENTS.items():
        outcome = train(start(built(), keep_fp32=KEEP, accumulation=accumulation, state=state, **options))
        expected = expected or outcome
        assert outcome[0] == expected[0], place
        assert differing(outcome[1], expected[1]) == differing(outcome[2], expected[2]) == [], place
    fp32_names = {name for name, dtype in dtypes(expected[1]).items() if dtype is torch.float32}
    assert fp32_names == {name for name in expected[1] if "norm" in name or "gate" in name or "head" in name}
    assert all(torch.equal(expected[1][name], expected[2][name]) for name in fp32_names), (
        "they are their masters"
    )
    before = built().state_dict()
    assert all(not torch.equal(expected[2][name], before[name]) for name in fp32_names)


@pytest.mark.parametrize(
    "options", [{"precision": "fp16", "fp16": {"loss_scale": 256}}, {"clip": 0.0}], ids=str
)
def test_no_placement_changes_a_bit_of_other_settings(start: Start, options: dict[str, Any]) -> None:
    runs = [train(start(built(), keep_fp32=KEEP, **options, **place)) for place in PLACEMENTS.values()]
    for run in runs[1:]:
        assert run[0] == runs[0][0]
        assert differing(run[1], runs[0][1]) == differing(run[2], runs[0][2]) == []


def test_steps_in_backward_change_no_bit(start: Start) -> None:
    settings = {"keep_fp32": KEEP, "clip": 0.0, "accumulation": 1}
    expected = train(start(built(), **settings))
    stepped = train(start(built(), step_in_backward=True, **settings, **PLACEMENTS["nvme, everything moves"]))
    assert stepped[0] == expected[0]
    assert differing(stepped[2], expected[2]) == []


def test_as_a_plain_loop(start: Start) -> None:
    """Gradients of what is kept are fp32 up to the step: with SGD they are the difference, to the last bit."""
    engine = start(
        built(),
        keep_fp32=KEEP,
        accumulation=1,
        clip=0.0,
        rule="SGD",
        optimizer={"lr": 0.5},
        **PLACEMENTS["nvme"],
    )
    model = built().to(torch.bfloat16)
    fp32_params = {name: p for name, p in model.named_parameters() if any(word in name for word in KEEP)}
    original = dict(built().named_parameters())
    for name, param in fp32_params.items():
        param.data = original[name].data.clone()
    (tokens,) = inputs(1)
    loss, expected = engine(tokens), model(tokens)
    assert loss.item() == expected.item()
    engine.backward(loss)
    expected.backward()
    engine.step()
    for name, param in fp32_params.items():
        assert torch.equal(engine.get_fp32_parameter(name), param.detach() - 0.5 * param.grad), name


def test_an_optimizer_without_a_kernel(start: Start) -> None:
    """It steps what is kept where it is; the others' masters are beside them."""

    def client(params: Any) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(params, lr=1e-2)

    engine = start(built(), keep_fp32=KEEP, client=client, rule=None, accumulation=1)
    losses, weights, masters = train(engine, steps=6)
    assert losses[-2] < losses[0]
    assert torch.equal(weights["head.weight"], masters["head.weight"])
    assert weights["layers.0.experts"].dtype is torch.bfloat16


def test_the_plan_and_the_groups(start: Start) -> None:
    """The head moves as a group in fp32; a block's norm and router stay on the device, as the block comes and goes."""
    engine = start(built(), keep_fp32=KEEP, **PLACEMENTS["nvme, everything moves"])
    groups = {group.name: group for group in engine._groups}
    assert groups["head"].dtype is torch.float32 and groups["head"].moves
    assert [piece.name for piece in groups["layers.1"].layout.pieces] == ["layers.1.experts"]
    assert groups["layers.1"].dtype is torch.bfloat16
    stays = groups["persistent in fp32"]
    assert not stays.moves
    assert {piece.name.rpartition("layers.1.")[2] for piece in stays.layout.pieces} >= {
        "gate.weight",
        "norm.bias",
    }
    sizes = {group.name: group for group in engine.plan.workload.groups}
    assert sizes["head"].param_bytes == groups["head"].layout.numel * 4
    assert engine.plan.workload.state_bytes(sizes["head"]) == groups["head"].layout.trainable_numel * 8


def test_edits_by_name_and_by_hand(start: Start) -> None:
    for options in (PLACEMENTS["device"], PLACEMENTS["nvme, everything moves"]):
        engine = start(built(), keep_fp32=KEEP, **options)
        values = torch.linspace(-1, 1, 300 * WIDTH).view(300, WIDTH) / 3
        engine.set_fp32_parameter("head.weight", values)
        assert torch.equal(engine.get_fp32_parameter("head.weight"), values)
        with tiering.gathered(engine.module.head.weight, modify=True) as weight, torch.no_grad():
            assert weight.dtype is torch.float32
            weight.add_(1e-6)
        assert torch.equal(engine.get_fp32_parameter("head.weight"), values + 1e-6)
        train(engine, 1)
        moment = engine.get_fp32_state("head.weight", "exp_avg")
        engine.set_fp32_state("head.weight", "exp_avg", moment * 2)
        assert torch.equal(engine.get_fp32_state("head.weight", "exp_avg"), moment * 2)


@pytest.mark.parametrize("state", ["fp32", "split+bf16"])
def test_checkpoints_go_on_to_the_bit_and_to_other_settings(start: Start, tmp_path: Path, state: str) -> None:
    engine = start(built(), keep_fp32=KEEP, state=state)
    train(engine, 2)
    engine.save_checkpoint(tmp_path / "saved")
    masters = engine.master_state_dict()
    expected = train(engine, 2)
    for options in (PLACEMENTS["device"], PLACEMENTS["nvme, everything moves"]):
        other = start(built(), keep_fp32=KEEP, state=state, **options)
        other.load_checkpoint(tmp_path / "saved")
        outcome = train(other, 2)
        assert outcome[0] == expected[0]
        assert differing(outcome[2], expected[2]) == []
    without = start(built(), state=state, **PLACEMENTS["nvme"])
    without.load_checkpoint(tmp_path / "saved")
    assert differing(without.master_state_dict(), masters) == []
    assert set(dtypes(without.state_dict()).values()) == {torch.bfloat16}


def test_weights_files_and_exports(start: Start, tmp_path: Path) -> None:
    save_file(built().state_dict(), tmp_path / "model.safetensors")
    for options in (PLACEMENTS["device"], PLACEMENTS["nvme, everything moves"]):
        engine = start(Routed(), keep_fp32=KEEP, weights=tmp_path / "model.safetensors", **options)
        assert differing(engine.master_state_dict(), built().state_dict()) == []
        stored = load_file(engine.save_16bit_model(tmp_path / "out"))
        assert differing(stored, engine.state_dict()) == []
        assert (stored["head.weight"].dtype, stored["embedding.weight"].dtype) == (
            torch.float32,
            torch.bfloat16,
        )


def test_a_model_without_memory(start: Start) -> None:
    torch.manual_seed(11)
    with tiering.zero.Init():
        model = Routed()
    outcome = train(start(model, keep_fp32=KEEP, **PLACEMENTS["nvme"]))
    expected = train(start(built(), keep_fp32=KEEP))
    assert outcome[0] == expected[0]
    assert differing(outcome[2], expected[2]) == []


def test_release_gives_both_dtypes_back(start: Start) -> None:
    model = built()
    engine = start(model, keep_fp32=KEEP, **PLACEMENTS["nvme, everything moves"])
    _, weights, _ = train(engine, 1)
    engine.release()
    assert differing(model.state_dict(), weights) == []


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["norm"], {"layers.0.norm.weight", "layers.0.norm.bias", "norm.weight", "norm.bias"}),
        (["layers.0.norm"], {"layers.0.norm.weight", "layers.0.norm.bias"}),
        (["norm.bias"], {"layers.0.norm.bias", "norm.bias"}),
        (["nor"], set()),
        (["*gate*"], {"layers.0.gate.weight"}),
        (["gate*"], set()),
        (["?orm.weight", "layers.[0-9].norm.w*"], {"layers.0.norm.weight", "norm.weight"}),
        ([], set()),
    ],
    # Sorted: a set's order differs from worker to worker, which have to find the same tests.
    ids=lambda names: ",".join(sorted(names)) or "none",
)
def test_patterns(patterns: list[str], names: set[str], nvme: Path) -> None:
    model = Routed()
    settings, _ = ds_config.load(config(nvme, keep_fp32=patterns), world_size=1)
    fp32_params = kept_in_fp32(model, settings)
    of_one_layer = {
        n for n, p in model.named_parameters() if p in fp32_params and ".1." not in n and ".2." not in n
    }
    assert of_one_layer == names
    in_fp32, _ = ds_config.load(config(nvme, keep_fp32=patterns, precision="fp32"), world_size=1)
    assert kept_in_fp32(model, in_fp32) == frozenset()


def test_a_pattern_without_a_match_is_told_once(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        start(built(), keep_fp32=["norm", "nrom"])
        start(built())
    messages = [r.getMessage() for r in caplog.records if "keep_fp32" in r.getMessage()]
    assert messages == [
        "tiering.keep_fp32: no parameter of the model matches 'nrom'",
        "8 parameters stay fp32 (tiering.keep_fp32)",
    ]
    with pytest.raises(ConfigError, match="keep_fp32"):
        start(built(), keep_fp32=5)


@pytest.mark.parametrize(
    ("precision", "names"), [("bf16", {"gate.weight"}), ("fp16", {"gate.weight", "norm.weight", "norm.bias"})]
)
def test_what_a_model_of_transformers_names(start: Start, precision: str, names: set[str]) -> None:
    """One list counts in both dtypes of 16 bits, the other one in fp16 alone; a list of one's own replaces both."""
    model = built()
    model.layers[1]._keep_in_fp32_modules_strict = {"gate"}  # type: ignore[assignment]
    model.layers[1]._keep_in_fp32_modules = ["norm"]  # type: ignore[assignment]
    fp16 = {"loss_scale": 64}
    state = start(copy.deepcopy(model), precision=precision, fp16=fp16).state_dict()
    fp32_names = {name for name, dtype in dtypes(state).items() if dtype is torch.float32}
    assert fp32_names == {f"layers.1.{name}" for name in names}
    state = start(model, precision=precision, fp16=fp16, keep_fp32=["head.bias"]).state_dict()
    assert [name for name, dtype in dtypes(state).items() if dtype is torch.float32] == ["head.bias"]


@pytest.mark.parametrize("pattern", ["0.weight", "0", "*.weight"])
def test_tiles_are_kept_by_the_name_of_the_whole_weight(start: Start, pattern: str) -> None:
    """And ``tiering.tile`` counts their bytes in fp32."""
    model = nn.Sequential(nn.Linear(64, 256, bias=False), nn.Tanh(), nn.Linear(256, 64))
    engine = start(model, keep_fp32=[pattern], tile=32 << 10, threshold=0)
    tiles = {name: param for name, param in model.named_parameters() if name.startswith("0.")}
    assert {name: (tuple(param.shape), param.dtype) for name, param in tiles.items()} == {
        "0.tiles.0.weight": ((128, 64), torch.float32),
        "0.tiles.1.weight": ((128, 64), torch.float32),
    }
    assert engine.state_dict()["0.weight"].dtype is torch.float32


def test_statistics_of_a_normalisation_that_is_kept(start: Start) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8))
    engine = start(model, keep_fp32=["1"], accumulation=1)
    loss = engine(torch.randn(4, 8, dtype=torch.bfloat16)).float().square().mean()
    engine.backward(loss)
    engine.step()
    state = engine.state_dict()
    assert (state["1.running_mean"].dtype, state["3.running_mean"].dtype) == (torch.float32, torch.bfloat16)


ON_GPU: dict[str, dict[str, Any]] = {
    "host, some visits": {
        "offload_param": "cpu",
        "offload_optimizer": "cpu",
        "update_on_device": 0.5,
        "sub_group_size": 4096,
        "threshold": 0,
    },
    "state on nvme": {**STREAMED, "threshold": 0},
    "all on the device": {},
}


@pytest.mark.one_of(4)
@pytest.mark.parametrize("place", ON_GPU)
@pytest.mark.parametrize("state", ["fp32", "split"])
def test_a_gpu_gives_the_same_bits(
    start: Start, monkeypatch: pytest.MonkeyPatch, place: str, state: str
) -> None:
    """A fake one, whose memory is not the host's: gradients leave it, and updated parameters come back."""
    sqrt = Tensor.sqrt  # a CPU's in torch is not rounded correctly
    monkeypatch.setattr(Tensor, "sqrt", lambda tensor: sqrt(tensor.double()).float())
    settings = {"keep_fp32": KEEP, "state": state}
    expected = train(start(built(), **settings), 2)
    with pytest.MonkeyPatch.context() as patch, FakeDevice(never) as gpu:
        gpu.run_engines(patch)
        engine = start(built(), **settings, **ON_GPU[place])
        outcome = train(engine, 2)
        engine.close()
    assert differing(outcome[1], expected[1]) == differing(outcome[2], expected[2]) == []
    assert outcome[0] == expected[0]
