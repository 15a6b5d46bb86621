"""Which blocks are cut into their modules, and which modules stay whole."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import nn

from zero3.building.tiling import tile
from zero3.params.grouping import form_groups

from .test_grouping import Block, Model


def names_of(model: nn.Module, largest: int, leaves: Collection[nn.Module] = ()) -> list[str]:
    return [group.name for group in form_groups(model, 0, leaves, largest=largest)]


def test_a_block_that_is_too_large_is_cut_into_its_modules() -> None:
    model = Model(
        table=nn.Embedding(10, 8), blocks=nn.ModuleList([Block(8), Block(16)]), head=nn.Linear(8, 10)
    )
    sizes = [sum(param.numel() for param in block.parameters()) for block in model.blocks]
    assert names_of(model, sizes[1]) == ["root", "blocks.0", "blocks.1"]
    cut = ["blocks.1.norm", "blocks.1.up", "blocks.1.down"]
    assert names_of(model, sizes[0]) == ["root", "blocks.0", *cut]
    assert names_of(model, 85) == ["root", "blocks.0.norm", "blocks.0.up", "blocks.0.down", *cut, "head"]
    assert names_of(model, 0)[:2] == ["table", "blocks.0.norm"]
    assert names_of(model, 0, [model.blocks[1]])[-2:] == ["blocks.1", "head"]


def test_modules_whose_parameters_are_used_together_are_not_cut() -> None:
    class Layer(nn.Module):
        """As peft has it."""

        def __init__(self) -> None:
            super().__init__()
            self.base_layer, self.lora_A = nn.Linear(8, 8), nn.Linear(8, 2)

    compiled = Block()
    # As after compile(), which imports the compiler.
    compiled._compiled_call_impl = compiled.forward

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))
            self.attention = nn.MultiheadAttention(8, 2)
            self.adapted = Layer()
            self.inner = compiled
            self.encoder = nn.TransformerEncoderLayer(8, 2)

    names = names_of(Model(blocks=nn.ModuleList([Parts(), Block()])), 0)
    parts = ["blocks.0", "blocks.0.attention", "blocks.0.adapted", "blocks.0.inner", "blocks.0.encoder"]
    assert names == [*parts, "blocks.1.norm", "blocks.1.up", "blocks.1.down"]
    groups = form_groups(Model(blocks=nn.ModuleList([Parts(), Block()])), 0, largest=0)
    assert {group.parent for group in groups} == {None, 0}


def test_an_adapted_layer_in_tiles_is_cut() -> None:
    class Layer(nn.Module):
        """As peft has it."""

        def __init__(self) -> None:
            super().__init__()
            self.base_layer, self.lora_A = nn.Linear(8, 8), nn.Linear(8, 2)

    model = tile(Model(blocks=nn.ModuleList([Layer(), Block()])), 4 * 8 * 4)
    cut = [
        "blocks.0.base_layer",
        "blocks.0.base_layer.tiles.0",
        "blocks.0.base_layer.tiles.1",
        "blocks.0.lora_A",
    ]
    assert names_of(model, 0)[:4] == cut


def test_only_modules_inside_of_blocks_stay_together() -> None:
    """A module around the layers of the head would hold what is called apart."""
    model = Model(
        blocks=nn.ModuleList([Block(), Block()]),
        head=nn.Sequential(nn.Linear(8, 16), nn.Identity(), nn.Linear(16, 10)),
    )
    groups = form_groups(model, 0, largest=0, together=1 << 20)
    assert [group.name for group in groups] == ["blocks.0", "blocks.1", "head.0", "head.2"]


def test_the_number_of_tiles_does_not_change_how_often_a_block_is_counted() -> None:
    """A plan tries tiles of many sizes: a count of the block for each tile made it quadratic."""

    class Counted(Block):
        counts = 0

        def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
            self.counts += 1
            return super().parameters(recurse)

    counts = {}
    for nbytes in (512, 64):
        model = Model(
            table=nn.Embedding(10, 8), blocks=nn.ModuleList([Counted(8), Counted(8)]), head=nn.Linear(8, 10)
        )
        tile(model, nbytes)
        groups = form_groups(model, 0, largest=0)
        counts[len(groups)] = [block.counts for block in model.blocks]
    few, many = sorted(counts)
    assert many > 3 * few
    assert counts[few] == counts[many]
