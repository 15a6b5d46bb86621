"""Frozen linear layers in block formats: which layers, their arithmetic, adapters over them, and every placement."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import tiering
from optim_cpu.formats import quantized
from tiering.checkpoint.conversion import to_weights
from tiering.checkpoint.reader import open_checkpoint
from tiering.errors import CheckpointError, ConfigError, EngineStateError, WeightsError
from zero3.building.encoded_weights import encoded_sources, encoded_tensors
from zero3.building.quantized_linear import QuantizedLinear

PLACEMENTS: list[dict[str, Any]] = [
    {},
    {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False},
]
WIDTH = 64


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.gate(functional.gelu(self.down(functional.gelu(self.up(x)))))
        return output


def model(*, frozen: bool = True) -> Model:
    torch.manual_seed(5)
    return Model().requires_grad_(not frozen)


def test_frozen_layers_are_quantised_in_place() -> None:
    plain, changed = model(), model()
    changed.gate.requires_grad_(True)
    called: list[tuple[int, ...]] = []
    changed.up.register_forward_hook(lambda module, args, output: called.append(tuple(output.shape)))
    up = changed.up
    assert tiering.quantize(changed, "int8") is changed
    assert [type(layer) for layer in (changed.up, changed.down, changed.gate)] == [
        QuantizedLinear, QuantizedLinear, nn.Linear,
    ]  # fmt: skip
    assert changed.up is up and isinstance(up, QuantizedLinear)
    assert (up.weight.dtype, up.weight_scales.dtype) == (torch.int8, torch.uint8)
    assert (up.in_features, up.out_features, up.weight.shape) == (WIDTH, 2 * WIDTH, (2 * WIDTH * WIDTH,))
    form = quantized("int8")
    expected = form.decode(form.encode(plain.up.weight.detach()))
    assert torch.equal(up.dequantized_weight(), expected)
    changed.to(torch.bfloat16)
    assert torch.equal(up.dequantized_weight(), expected)  # a cast reaches the bias only
    assert up.bias.dtype is torch.bfloat16
    changed(torch.ones(2, WIDTH, dtype=torch.bfloat16))
    assert called == [(2, 2 * WIDTH)]
    again = copy.deepcopy(changed)
    assert isinstance(again.up, QuantizedLinear) and torch.equal(again.up.weight, up.weight)
    assert "form=int8, block_size=64" in repr(changed)


def test_a_layer_on_meta_has_the_same_shapes_and_takes_saved_values() -> None:
    with torch.device("meta"):
        empty = Model().requires_grad_(False)
    tiering.quantize(empty, "nf4")
    filled = tiering.quantize(model(), "nf4")
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in empty.state_dict().items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in filled.state_dict().items()
    }
    assert all(param.is_meta for param in empty.parameters())
    built = QuantizedLinear(WIDTH, 2 * WIDTH, quantized("nf4"))
    built.load_state_dict(filled.up.state_dict())  # type: ignore[union-attr] # Module's attributes
    x = torch.randn(3, WIDTH)
    assert torch.equal(built(x), filled.up(x))  # type: ignore[operator]


@pytest.mark.parametrize("name", ["nf4", "int8", "fp8"])
@pytest.mark.parametrize("rows", [1, 20])
def test_backward_needs_the_codes_only(name: str, rows: int) -> None:
    layer = tiering.quantize(model(), name).up
    layer.bias.requires_grad_(True)  # type: ignore[union-attr]
    x = torch.randn(rows, 2, WIDTH, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        y = layer(x)  # type: ignore[operator]
    assert [tensor.data_ptr() for tensor in saved] == [
        layer.weight.data_ptr(),
        layer.weight_scales.data_ptr(),
    ]  # type: ignore[union-attr]
    grad = torch.randn_like(y)
    y.backward(grad)
    weight = layer.dequantized_weight()  # type: ignore[operator]
    torch.testing.assert_close(y, functional.linear(x, weight, layer.bias))  # type: ignore[arg-type]
    torch.testing.assert_close(x.grad, grad @ weight)
    torch.testing.assert_close(layer.bias.grad, grad.sum((0, 1)))  # type: ignore[union-attr]
    assert layer.weight.grad is None  # type: ignore[union-attr]


def test_autocast_computes_in_its_dtype() -> None:
    layer = tiering.quantize(model(), "nf4").up
    x = torch.randn(3, WIDTH, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)  # type: ignore[operator]
    assert y.dtype is torch.bfloat16
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype is torch.float32


def test_a_result_can_be_changed_in_place_and_inputs_that_are_no_floats_are_refused() -> None:
    layer = tiering.quantize(model(), "nf4").down
    x = torch.randn(3, 2, 2 * WIDTH, requires_grad=True)
    expected = functional.linear(x, layer.dequantized_weight()).clamp_min(0)  # type: ignore[operator]
    (gradient,) = torch.autograd.grad(expected.sum(), x)
    y = functional.relu_(layer(x))  # type: ignore[operator]
    y.sum().backward()
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(x.grad, gradient)
    with pytest.raises(TypeError, match=r"linear layer 'down' in nf4 was called with torch.uint8.*modules="):
        layer(x.to(layer.weight.dtype))  # type: ignore[operator, union-attr] # as T5 does before its layer wo


def test_the_default_leaves_out_what_a_model_keeps_in_fp32_and_what_no_block_divides(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mixed = model()
    mixed.narrow = nn.Linear(100, 64)
    mixed.requires_grad_(False)
    mixed._keep_in_fp32_modules = ["down"]  # type: ignore[assignment] # as T5 has "wo"
    with caplog.at_level(logging.WARNING):
        tiering.quantize(mixed, "nf4")
    layers = {name for name, layer in mixed.named_modules() if isinstance(layer, QuantizedLinear)}
    assert layers == {"up", "gate"}
    assert (
        "quantize leaves out 1 layer whose inputs are no multiple of the block size 64: narrow" in caplog.text
    )
    tiering.quantize(mixed, "nf4", modules="down")  # which is named
    assert isinstance(mixed.down, QuantizedLinear)
    with pytest.raises(ConfigError, match=r"'narrow' has 100 inputs, no multiple of the block size 64"):
        tiering.quantize(mixed, "nf4", modules="narrow")
    with pytest.raises(
        ConfigError, match=r"no frozen nn.Linear has inputs that are.*64 \(0\); choose a smaller"
    ):
        tiering.quantize(nn.Sequential(nn.Linear(32, 32)).requires_grad_(False), "nf4")


def test_torchs_encoder_calls_its_quantised_layers() -> None:
    torch.manual_seed(8)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
    encoder = tiering.quantize(nn.TransformerEncoder(layer, 2).requires_grad_(False), "int8")
    x, padding = torch.randn(2, 6, WIDTH), torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    expected = encoder.train()(x, src_key_padding_mask=padding)
    with torch.no_grad():
        fused = encoder.eval()(x, src_key_padding_mask=padding)
    torch.testing.assert_close(fused[~padding], expected[~padding])


class ReadsWeight(nn.Module):
    """As the mixers of Jamba do with their layer ``dt_proj``."""

    def __init__(self) -> None:
        super().__init__()
        self.dt_proj = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x @ self.dt_proj.weight.t())  # type: ignore[no-any-return]


def test_a_module_that_computes_with_codes_is_named(start: Callable[..., Any]) -> None:
    outer = nn.Sequential(ReadsWeight())
    outer[0].dt_proj.requires_grad_(False)  # type: ignore[union-attr, operator]
    engine = start(tiering.quantize(outer, "int8"), accumulation=1)
    with pytest.raises(RuntimeError, match="size") as caught:
        engine(torch.ones(2, WIDTH))
    (note,) = caught.value.__notes__
    assert note.startswith("'0' has quantised layers (dt_proj), whose weights are flat codes.")


def test_inputs_that_do_not_fit_a_quantised_layer_are_named() -> None:
    quantised = tiering.quantize(model().double(), "nf4", modules=["up", "down"])
    assert torch.equal(quantised.up.weight, tiering.quantize(model(), "nf4").up.weight)  # type: ignore[union-attr]
    up = quantised.up
    words = r"linear layer 'up' in nf4 has 64 inputs and was called with a tensor of shape \(2, 128\)"
    with pytest.raises(ValueError, match=words):
        up(torch.ones(2, 128))  # type: ignore[operator] # two rows would make four of 64
    with torch.device("meta"):
        empty = tiering.quantize(Model().requires_grad_(False), "nf4", modules=["up", "down"])
    assert empty(torch.empty(5, WIDTH, device="meta")).shape == (5, 3)
    with pytest.raises(
        EngineStateError, match=r"'up' in nf4 is on the meta device.*pass weights= to tiering.init"
    ):
        empty(torch.ones(5, WIDTH))


def test_codes_of_another_format_are_refused(start: Callable[..., Any], tmp_path: Path) -> None:
    def base(name: str) -> Model:
        layers = tiering.quantize(model(), name, modules=["up", "down"])
        layers.gate.requires_grad_(True)  # type: ignore[union-attr]
        return layers  # type: ignore[return-value]

    start(base("int8"), threshold=0).save_checkpoint(tmp_path, tag="one")
    converted = to_weights(open_checkpoint(tmp_path / "one"), tmp_path / "converted")
    assert converted.caveats[0].startswith("2 quantised weights, such as 'up.weight', are written as codes")
    converted = to_weights(open_checkpoint(tmp_path / "one"), tmp_path / "trained", exclude_frozen=True)
    assert converted.caveats == ()
    with pytest.raises(
        CheckpointError, match=r"'up.weight' is I8 and.* layer 'up' is in fp8 with blocks of 64"
    ):
        start(base("fp8"), threshold=0).load_checkpoint(tmp_path)
    save_file(base("fp8").state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"'up.weight' is U8 and should be torch.int8"):
        start(base("int8"), weights=tmp_path / "model.safetensors")
    other = base("int8")
    codes = other.up.weight.clone()
    with pytest.raises(
        RuntimeError, match=r"up.weight is torch.uint8, and not torch.int8 as the codes of int8"
    ):
        other.load_state_dict(base("fp8").state_dict())
    with pytest.raises(
        RuntimeError, match=r"up.weight is torch.float32, and not torch.int8.*before tiering.quant"
    ):
        other.load_state_dict(model().state_dict(), strict=False)
    assert torch.equal(other.up.weight, codes)


FORMATS: dict[str, dict[str, Any]] = {
    "none": {},
    "nf4": {},
    "nf4 with plain scales": {"double_quant": False},
    "nf4 in blocks of 32": {"block_size": 32},
    "int8": {},
    "fp8": {},
    "fp8 in blocks of 32": {"block_size": 32},
}


@pytest.mark.slow
def test_a_checkpoint_of_another_quantisation_is_named_and_changes_nothing(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    def engine(name: str) -> Any:
        layers = model()
        if name != "none":
            tiering.quantize(layers, name.split()[0], modules=["up", "down"], **FORMATS[name])
        layers.gate.requires_grad_(True)
        return start(layers, threshold=0)

    for name in FORMATS:
        engine(name).save_checkpoint(tmp_path / name)
    for name in FORMATS:
        loaded = engine(name)
        before = loaded.state_dict()
        words = (
            r"is quantised in the files"
            if name == "none"
            else rf"layer 'up' is in {name[:3]}.* with blocks of"
        )
        for other in FORMATS:
            if other == name:
                continue
            for strict in (True, False):
                with pytest.raises(CheckpointError, match=words):
                    loaded.load_checkpoint(tmp_path / other, load_module_strict=strict)
        after = loaded.state_dict()
        assert all(torch.equal(after[key], value) for key, value in before.items())


def shared_weight() -> nn.Module:
    both = model()
    both.gate = nn.Linear(2 * WIDTH, WIDTH, bias=False)
    both.gate.weight = both.down.weight
    return both


def eight_bits() -> nn.Module:
    mixed = model()
    mixed.down.weight = nn.Parameter(mixed.down.weight.to(torch.float8_e4m3fn), requires_grad=False)
    return mixed


@pytest.mark.parametrize(
    ("make", "arguments", "words"),
    [
        (model, {"quant_type": "int3"}, r"unknown quantised format 'int3'; choose one of 'nf4'"),
        (model, {"block_size": 100}, r"block_size is 100; it must be a power of two from 32 to 4096"),
        (
            model,
            {"block_size": "64"},
            r"block_size is '64'; it must be a power of two from 32 to 4096, as an int",
        ),
        (
            eight_bits,
            {},
            r"the weight of 'down' is torch.float8_e4m3fn, and only floats of 16 bits or more can be",
        ),
        (
            model,
            {"block_size": 128, "modules": "up"},
            r"'up' has 64 inputs, no multiple of the block size 128",
        ),
        (lambda: model(frozen=False), {}, r"the model has no frozen nn.Linear; freeze it first"),
        (lambda: model(frozen=False), {"modules": "up"}, r"the weight of 'up' is to be trained.*freeze it"),
        (model, {"modules": ["up", "q_proj"]}, r"no module of the model is named 'q_proj', or ends in it"),
        (
            lambda: nn.Sequential(model(), nn.GELU()),
            {"modules": "1"},
            r"'1' is a GELU; only layers of class nn.Linear",
        ),
        (shared_weight, {"modules": "down"}, r"the weight of 'down' is shared with another module"),
        (
            lambda: tiering.tile(model(), "8KiB", modules="up"),
            {},
            r"the weight of 'up' is cut into tiles, and would stay as it is: call quantize before tiering\.tile",
        ),
        (
            lambda: tiering.tile(model(), "8KiB"),
            {"modules": "up"},
            r"'up' is a RowTiledLinear; only layers of",
        ),
    ],
)
def test_what_cannot_be_quantised_is_named(
    make: Callable[[], nn.Module], arguments: dict[str, Any], words: str
) -> None:
    unchanged = make()
    before = {name: param.clone() for name, param in unchanged.named_parameters()}
    with pytest.raises(ConfigError, match=words):
        tiering.quantize(unchanged, **({"quant_type": "nf4"} | arguments))
    after = dict(unchanged.named_parameters())
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_a_weight_that_is_not_finite_is_named() -> None:
    damaged = model()
    damaged.down.weight.view(-1)[7] = torch.nan
    with pytest.raises(ConfigError, match=r"the weight of 'down': an element is infinite or NaN"):
        tiering.quantize(damaged, "fp8")


def test_the_configuration_quantises_the_base_of_adapters(start: Callable[..., Any]) -> None:
    by_key, by_call = model(), tiering.quantize(model(), "nf4", modules=["up", "down"], block_size=32)
    for each in (by_key, by_call):
        each.gate.requires_grad_(True)  # type: ignore[union-attr]
    settings = {"type": "nf4", "block_size": 32}
    engines = [start(by_key, threshold=0, quantize=settings), start(by_call, threshold=0)]
    assert isinstance(by_key.up, QuantizedLinear) and type(by_key.gate) is nn.Linear
    left, right = (engine.state_dict() for engine in engines)
    assert left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)
    with tiering.zero.Init():
        unbuilt = model()
    with pytest.raises(
        ConfigError, match=r"'up' was built under zero.Init and has no values yet; build the model on"
    ):
        tiering.quantize(unbuilt, "nf4")


class Stored:
    """The values of a weight, as a file has them."""

    parts = (SimpleNamespace(name="up.weight"),)
    dtype = torch.float32

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def read(self, first: int, numel: int) -> Tensor:
        return self.values[first : first + numel]

    def release(self) -> None:
        pass


@pytest.mark.parametrize("name", ["nf4", "int8"])
@pytest.mark.parametrize("first_read", [0, 0.25, 0.5])
def test_a_rank_reads_codes_of_its_shard_and_all_scales(name: str, first_read: float) -> None:
    """Wherever its shard begins."""
    layer = QuantizedLinear(256, 512, quantized(name))
    values = torch.randn(512 * 256, generator=torch.Generator().manual_seed(4))
    codes, scales = layer.form.encode(values.view(512, 256))
    sources = encoded_sources(encoded_tensors(layer), {layer.weight: Stored(values)})  # type: ignore[dict-item] # a file's
    half, first = layer.weight.numel() // 2, int(first_read * layer.weight.numel())
    read = sources[layer.weight].read(first, half)
    assert torch.equal(read, codes.flatten()[first : first + half])
    assert torch.equal(sources[layer.weight_scales].read(0, scales.numel()), scales)


def test_stored_weights_of_another_shape_or_that_are_not_finite_are_named(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    state = {key: value.clone() for key, value in model().state_dict().items()}
    path = tmp_path / "model.safetensors"
    save_file(state | {"up.weight": torch.ones(WIDTH, WIDTH)}, path)
    layers = tiering.quantize(model(), "nf4", modules=["up", "down"])
    layers.gate.requires_grad_(True)  # type: ignore[union-attr]
    with pytest.raises(WeightsError, match=r"'up.weight' is \[64, 64\] and should be \[128, 64\]"):
        start(layers, weights=path)
    state["down.weight"][3, 100] = torch.inf
    save_file(state, path)
    with pytest.raises(WeightsError, match=r"'down.weight': an element is infinite or NaN"):
        start(layers, weights=path)
