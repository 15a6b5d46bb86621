"""Fused experts in block formats: their error, their products, placements, and what streams from files."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

import tiering
from optim_cpu.formats import quantized
from tests.e2e.fuzz.bodies import Fused
from tests.zero3.experts import EXPERTS, WIDTH, FusedModel, fused_model
from tests.zero3.inside import wait_for_transfers
from tests.zero3.passes.test_fused_experts import FEW, HABIT, MANY, NVME, PLACES, check_alike, routes, run
from tiering.checkpoint.conversion import to_weights
from tiering.checkpoint.reader import open_checkpoint
from tiering.errors import ConfigError
from zero3.building.quantized_experts import SCALES, EncodedMatrix, QuantizedExperts
from zero3.checkpoint import export

FORMATS = ["nf4", "int8", "fp8"]
NAMES = ("up_proj", "down_proj")


def quantised(form: str, *, grouped: bool, checkpointed: bool = False) -> FusedModel:
    model = fused_model(grouped=grouped, checkpointed=checkpointed).to(torch.bfloat16)
    tiering.quantize(model, form, modules="experts")
    return model


@pytest.mark.parametrize("form", FORMATS)
def test_each_expert_is_a_matrix_in_the_format(form: str) -> None:
    torch.manual_seed(2)
    fused = Fused(EXPERTS, WIDTH, grouped=False)
    fused.up_proj.data[3] *= 100
    originals = {name: getattr(fused, name).detach().clone() for name in NAMES}
    tiering.quantize(nn.ModuleDict({"experts": fused}), form)
    assert isinstance(fused, QuantizedExperts)
    kind = quantized(form)
    for name, original in originals.items():
        experts = getattr(fused, name)
        assert experts.shape == original.shape
        for number, matrix in enumerate(original):
            codes, scales = kind.encode(matrix)
            assert torch.equal(fused._parameters[name][number], codes.flatten())
            assert torch.equal(fused._parameters[name + SCALES][number, : scales.numel()], scales)
            decoded = experts[number].decoded()
            assert torch.equal(decoded, kind.decode((codes, scales)))
            largest = matrix.view(-1, kind.group_size).abs().amax(1, keepdim=True)
            error = (decoded - matrix).view(-1, kind.group_size).abs()
            assert bool((error <= largest * (kind.error + 0.02)).all())


@pytest.mark.parametrize("form", FORMATS)
def test_products_are_those_of_the_decoded_matrices(form: str) -> None:
    """By expert, transposed, with biases, stacked, and grouped, with gradients of the inputs."""
    torch.manual_seed(4)
    fused = Fused(4, WIDTH, grouped=False)
    tiering.quantize(nn.ModuleDict({"experts": fused}), form, double_quant=False)
    experts = fused.up_proj
    decoded = torch.stack([experts[number].decoded() for number in range(4)])
    x = torch.randn(5, WIDTH, requires_grad=True)
    y = torch.randn(5, WIDTH)

    def compare(product: Callable[[Any, Tensor], Tensor]) -> None:
        gradients, values = [], []
        for matrices in (experts, decoded):
            result = product(matrices, x)
            (gradient,) = torch.autograd.grad((result * y).sum(), x)
            values.append(result.detach())
            gradients.append(gradient)
        torch.testing.assert_close(values[0], values[1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-5)

    ends = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    compare(lambda each, x: functional.linear(x, each[torch.tensor(2)]))
    compare(lambda each, x: x @ each[1])
    compare(lambda each, x: x @ each.transpose(-2, -1)[1])
    compare(lambda each, x: functional.linear(x, each.mT[3]))
    compare(lambda each, x: torch._grouped_mm(x, each, offs=ends))
    compare(lambda each, x: torch._grouped_mm(x, each.mT, offs=ends))
    picked = torch.tensor([1, 0, 1, 3, 3])
    compare(lambda each, x: torch.bmm(each[picked], x.unsqueeze(-1)).squeeze(-1))
    assert torch.equal(torch.add(experts[0], 1), decoded[0] + 1)
    assert isinstance(experts[0], EncodedMatrix)
    assert torch.equal(experts.sum(0), decoded.sum(0))
    assert torch.equal(experts.mT[torch.tensor([2])][0], decoded[2].t())


@pytest.mark.parametrize(
    ("form", "place", "rows"),
    # The codes and the scales of int8 are fetched apart: one must not take the room of the other.
    [("nf4", "nvme, nothing ahead", FEW), ("int8", "nvme", MANY)],
)
def test_placement_changes_no_bit_of_quantised_experts(
    start: Callable[..., Any], form: str, place: str, rows: tuple[int, ...]
) -> None:
    check_alike(start, ["device", place], lambda: quantised(form, grouped=form == "nf4"), rows)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True], ids=["saved", "checkpointed"])
@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "indexed"])
@pytest.mark.parametrize("form", FORMATS)
def test_no_placement_changes_a_bit_of_quantised_experts(
    start: Callable[..., Any], form: str, grouped: bool, checkpointed: bool
) -> None:
    check_alike(
        start, list(PLACES), lambda: quantised(form, grouped=grouped, checkpointed=checkpointed), MANY
    )


def test_a_pass_reads_the_codes_and_scales_of_its_experts(start: Callable[..., Any]) -> None:
    engine = start(quantised("int8", grouped=True), **{**HABIT, **NVME, "prefetch": 10**5})

    def read_bytes() -> int:
        wait_for_transfers(engine)
        return sum(path.read.bytes for path in engine.snapshot().io)

    experts = [group for group in engine._groups if group.slices]
    assert len(experts[0].slices) == 4 * EXPERTS
    dense = sum(
        group.layout.numel * group.dtype.itemsize
        for group in engine._groups
        if group.moves and not group.slices
    )
    pages = {each.name: each.layout.numel * 2 for group in experts for each in group.slices}
    for seed in range(3):
        run(engine, 1, seed, training=False)
    before, expected = read_bytes(), 0
    for rows in (1, 2):
        run(engine, rows, rows, training=False)
        for layer, chosen in enumerate(routes(rows, rows)):
            names = [f"{name}{end}" for name in NAMES for end in ("", SCALES)]
            expected += sum(
                pages[f"layers.{layer}.experts.{name}[{expert}]"]
                for expert in chosen.unique().tolist()
                for name in names
            )
    assert read_bytes() - before == 2 * dense + expected


@pytest.mark.parametrize("form", FORMATS)
def test_experts_are_encoded_while_they_are_read(
    start: Callable[..., Any], form: str, tmp_path: Path
) -> None:
    model = fused_model(grouped=True).to(torch.bfloat16)
    save_file(
        {name: value.detach() for name, value in model.state_dict().items()}, tmp_path / "model.safetensors"
    )
    expected = quantised(form, grouped=True).state_dict()
    with torch.device("meta"):
        empty = fused_model(grouped=True).to(torch.bfloat16)
    tiering.quantize(empty, form, modules="experts")
    engine = start(empty, weights=tmp_path, **{**HABIT, **NVME})
    stored = engine.state_dict()
    assert stored.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(stored[name], expected[name])] == []


@pytest.mark.parametrize("form", FORMATS)
def test_an_export_holds_decoded_matrices(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(export, "RANGE", 1000)  # ranges that end inside a block
    model = quantised(form, grouped=True)
    expected = {
        f"layers.{number}.experts.{name}": torch.stack(
            [matrices[i].decoded(torch.bfloat16) for i in range(EXPERTS)]
        )
        for number, layer in enumerate(model.layers)
        for name in NAMES
        for matrices in [getattr(layer.experts, name)]
    }
    engine = start(model, **{**HABIT, **NVME})
    stored = load_file(engine.save_16bit_model(tmp_path / "16bit"))
    assert stored.keys() == fused_model(grouped=True).state_dict().keys()
    assert [name for name, value in expected.items() if not torch.equal(stored[name], value)] == []
    engine.save_checkpoint(tmp_path / "saved", tag="one")
    converted = to_weights(open_checkpoint(tmp_path / "saved" / "one"), tmp_path / "converted")
    warning = "8 quantised weights, such as 'layers.0.experts.up_proj', are written as codes"
    assert [caveat[: len(warning)] for caveat in converted.caveats] == [warning]


def test_quantised_experts_are_copied_pickled_and_refused() -> None:
    model = quantised("fp8", grouped=False)
    x, chosen = torch.randn(3, WIDTH).to(torch.bfloat16), routes(3, 0)
    expected = model(x, chosen)
    assert torch.equal(copy.deepcopy(model)(x, chosen), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x, chosen), expected)
    # Those that are quantised already do not count, in this format.
    tiering.quantize(model, "fp8", modules=["experts"])
    with pytest.raises(ConfigError, match=r"'layers.0.experts' is in fp8 with blocks of 64 already"):
        tiering.quantize(model, "int8", modules=["experts"])
    assert "form=fp8" in repr(model.layers[0].experts)
    trained = fused_model(grouped=False)
    trained.layers[1].experts.down_proj.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"the weight of 'layers.1.experts' is to be trained"):
        tiering.quantize(trained, "nf4", modules="experts")
    with pytest.raises(
        ConfigError, match=r"'layers.0.experts' has 64 inputs, no multiple of the block size 128"
    ):
        tiering.quantize(fused_model(grouped=False), "nf4", modules="experts", block_size=128)
