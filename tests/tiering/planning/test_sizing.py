"""A decoder of a given number of parameters: its shape, and the groups that the engine would make of it."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tiering.errors import ConfigError
from tiering.placement.group_sizes import GroupSizes
from tiering.placement.placement import place
from tiering.placement.plan import Budgets
from tiering.planning.adapters import Adapters
from tiering.planning.decoder import NAMED, Decoder, decoder, format_count, parse_count
from tiering.planning.decoder_groups import form_groups
from tiering.planning.setting import Setting, usual_config, with_changes
from tiering.planning.sizing import load_of
from zero3.building.tiling import tile_as_configured
from zero3.params import layout as partition
from zero3.params.grouping import form_groups as engine_groups
from zero3.setup.model_size import _uses_in_backward


def test_what_no_plan_could_list_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"400\.00T parameters are more than the maximum of 20\.00T"):
        decoder(400 * 10**12)


@pytest.mark.parametrize(
    ("text", "hidden", "layers", "intermediate", "params"),
    [
        ("7B", 4096, 32, 11008, 6_738_415_616),  # Llama 2 7B, to the parameter
        ("13B", 5120, 40, 13824, 13_015_864_320),  # Llama 2 13B
        ("175B", 12288, 96, 32768, 174_734_979_072),  # the hidden size and layers of GPT-3
    ],
)
def test_published_shapes_come_out(
    text: str, hidden: int, layers: int, intermediate: int, params: int
) -> None:
    assert decoder(parse_count(text)) == Decoder(hidden, layers, intermediate)
    assert decoder(parse_count(text)).params == params


@pytest.mark.parametrize(
    ("name", "params"),
    [("llama-3-8b", 8_030_261_248), ("qwen2.5-32b", 32_763_876_352), ("llama-3-70b", 70_553_706_496)],
)
def test_named_decoders_have_the_parameters_of_the_published_models(name: str, params: int) -> None:
    assert NAMED[name].params == params


def test_adapters_of_llama_3_70b_need_little_host_memory() -> None:
    """Two of the largest tensor, which is frozen, and the adapters of a block: 7.8 GiB were windows of frozen sizes."""
    config = usual_config(Path())
    setting = Setting(gpu_memory=24 << 30)
    load = load_of(NAMED["llama-3-70b"], config, setting, Adapters(16))
    assert NAMED["llama-3-70b"].trained_params(Adapters(16)) == 207_093_760
    plan = place(load, Budgets(12 << 30, int(4.2 * 2**30), 1 << 40))
    assert plan.fetch_window_bytes == 2 * 2 * 128_256 * 8192
    # With room for gradients and state besides, nothing is written.
    read, written = place(load, Budgets(12 << 30, int(7.25 * 2**30), 1 << 40)).nvme_traffic()
    assert written == 0 < read


@pytest.mark.parametrize(
    ("base", "per_weight"),
    [("nf4", 0.5 + 1 / 64 + 4 / (64 * 256)), ("int8", 1 + 4 / 64), ("fp8", 1 + 4 / 64)],
)
def test_frozen_linear_layers_take_the_bytes_of_their_format(base: str, per_weight: float) -> None:
    shape = NAMED["llama-3-8b"]
    load = load_of(shape, usual_config(Path()), Setting(), Adapters(16, base=base))
    frozen = [group for group in load.groups if group.name.endswith(".5 (frozen)")]
    block = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    # Scales of the projections of keys and values are below the persistence threshold.
    assert [group.param_bytes / block for group in frozen] == [pytest.approx(per_weight, rel=2e-3)]
    (embedding,) = (group for group in load.groups if group.name == "model.embed_tokens")
    assert embedding.param_bytes == 2 * 128_256 * 4096


def test_layers_that_are_larger_than_a_tile_are_cut() -> None:
    cut, whole = (
        form_groups(Decoder(1024, 2, 2816), persistence_threshold=100_000, itemsize=2, largest=0, tile=tile)
        for tile in (1 << 20, 0)
    )
    assert sum(group.trainable_numel for group in cut) == sum(group.trainable_numel for group in whole)
    # Matrices of 2 and 5.5 MiB, of 512 and 186 rows in a tile, and embeddings of 62.5 MiB.
    assert max(group.largest_trained for group in cut) == 512 * 1024
    names = [group.name for group in cut]
    assert [name for name in names if ".0.self_attn.q_proj" in name] == [
        f"model.layers.0.self_attn.q_proj.tiles.{number}" for number in range(2)
    ]
    down = [group for group in cut if ".1.mlp.down_proj" in group.name]
    # 1,024 rows of 2,816 elements: a multiple of 16 rows is one of 4,096 elements.
    assert [group.trainable_numel // 2816 for group in down] == [176] * 5 + [144]
    assert len([name for name in names if name.startswith("model.embed_tokens.tiles.")]) == 63


def test_a_tile_that_has_no_room_for_a_row_is_refused() -> None:
    config = with_changes(usual_config(Path()), tiers={"tile": 4096})
    with pytest.raises(ConfigError, match=r"'mlp.down_proj' has 5\.50 KiB.* at least 5\.50 KiB can hold it"):
        load_of(Decoder(1024, 2, 2816), config, Setting())
    # The wide layers are stored as they are.
    load_of(Decoder(1024, 2, 2816), config, Setting(), Adapters(8, base="int8"))


def test_modules_without_a_linear_layer_of_that_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="no linear layer of the model is called 'c_attn'"):
        load_of(decoder(60_000_000), usual_config(Path()), Setting(), Adapters(8, ("q_proj", "c_attn")))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"rank": 0}, "at least 1"), ({"rank": 8, "base": "int4"}, "unknown format 'int4'")],
)
def test_impossible_adapters_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Adapters(**arguments)


@given(st.floats(math.log(12e6), math.log(19e12)))
def test_any_size_has_a_shape_within_five_percent(exponent: float) -> None:
    count = int(math.exp(exponent))
    shape = decoder(count)
    assert abs(shape.params - count) <= 0.05 * count
    assert shape.hidden % 128 == shape.intermediate % 256 == 0
    assert shape.heads * 128 == shape.hidden
    assert shape.layers >= 2


def test_what_is_too_small_is_refused_with_the_smallest() -> None:
    with pytest.raises(ConfigError, match=r"no decoder of 1\.00M parameters: the smallest has 8\.72M"):
        decoder(10**6)


@pytest.mark.parametrize(
    ("text", "count"),
    [("7B", 7 * 10**9), ("1.5b", 1_500_000_000), ("350M", 350 * 10**6), ("2T", 2 * 10**12), ("123", 123)],
)
def test_counts_are_decimal(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "7 GiB", "B", "-7B", "7e9", "1,5B"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"'350M', '7B' or '1\.5T'"):
        parse_count(text)


def test_counts_are_told_with_two_decimals() -> None:
    assert [format_count(n) for n in (999, 1_500, 6_738_415_616, 10**12)] == [
        "999",
        "1.50K",
        "6.74B",
        "1.00T",
    ]


WITH_TRANSFORMERS = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


def llama(shape: Decoder) -> nn.Module:
    """That of transformers, on the meta device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=shape.hidden,
                num_hidden_layers=shape.layers,
                num_attention_heads=shape.heads,
                intermediate_size=shape.intermediate,
                vocab_size=shape.vocabulary,
            )
        )
    return model


def formed(
    model: nn.Module, threshold: int, itemsize: int, world_size: int, largest: int | None
) -> list[GroupSizes]:
    """The sizes of the groups that the engine makes of ``model``, by the names that it has without adapters."""
    trained = {param for param in model.parameters() if param.requires_grad}
    groups = []
    for group in engine_groups(model, threshold, trained=trained, largest=largest):
        layout = partition.lay_out(
            [(i, name, tuple(p.shape), p in trained) for i, name, p in group.params], itemsize, world_size
        )
        groups.append(
            GroupSizes(
                group.name.replace("base_model.model.", ""),
                layout.numel * itemsize,
                layout.trainable_numel,
                group.parent,
                group.persistent,
                len(group.entries),
                _uses_in_backward(group),
                largest_trained=max((piece.numel for piece in layout.pieces if piece.trainable), default=0),
                beside=group.beside,
            )
        )
    return groups


@WITH_TRANSFORMERS
@pytest.mark.parametrize(
    ("shape", "threshold", "itemsize", "world_size"),
    [
        (Decoder(4096, 32, 11008), 100_000, 2, 1),  # the embedding is smaller than a block
        (Decoder(1024, 3, 2816), 100_000, 2, 1),  # and here it is larger
        (Decoder(1024, 3, 2816), 0, 4, 1),  # the last norm is the root's
        (Decoder(256, 2, 768), 10**6, 2, 3),  # matrices of the blocks stay, too
        (Decoder(5120, 5, 13824), 100_000, 2, 8),
    ],
)
@pytest.mark.parametrize("largest", [None, 10**7, 0])
def test_groups_are_those_of_a_llama_of_that_shape(
    shape: Decoder, threshold: int, itemsize: int, world_size: int, largest: int | None
) -> None:
    model = llama(shape)
    assert sum(p.numel() for p in model.parameters()) == shape.params
    sized = form_groups(
        shape, persistence_threshold=threshold, itemsize=itemsize, world_size=world_size, largest=largest
    )
    assert list(sized) == formed(model, threshold, itemsize, world_size, largest)


@WITH_TRANSFORMERS
# Transformers has renamed what peft calls.
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*is deprecated:FutureWarning")
@pytest.mark.parametrize("largest", [None, 0])
@pytest.mark.parametrize("tile", [1 << 20, 1 << 22])
@pytest.mark.parametrize(("rank", "threshold", "world_size"), [(0, 1000, 1), (16, 100_000, 1), (200, 0, 2)])
def test_groups_are_those_of_a_llama_in_tiles_below_adapters(
    rank: int, threshold: int, world_size: int, tile: int, largest: int | None
) -> None:
    """Adapters of rank 200 are cut, too."""
    shape, model = Decoder(1024, 2, 2816), llama(Decoder(1024, 2, 2816))
    if rank:
        import peft

        config = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
        with torch.device("meta"):
            model = peft.get_peft_model(model, config)
    tile_as_configured(model, with_changes(usual_config(Path()), tiers={"tile": tile}))
    sized = form_groups(
        shape,
        persistence_threshold=threshold,
        itemsize=2,
        world_size=world_size,
        adapters=Adapters(rank) if rank else None,
        largest=largest,
        tile=tile,
    )
    assert list(sized) == formed(model, threshold, 2, world_size, largest)
