"""Which parameters move together, and which calls bring them."""

from __future__ import annotations

import logging
from collections.abc import Collection

import pytest
import torch
from torch import nn

from tests.e2e.fuzz.bodies import Fused
from tiering.config.training import LeafModulesConfig
from tiering.errors import ConfigError
from zero3.params.grouping import GroupMembers, Routing, form_groups, leaf_modules
from zero3.params.inner_tensors import InnerTensor


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)


class Model(nn.Module):
    """Modules by name, in the order given."""

    def __init__(self, **children: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


def blocks(count: int = 3) -> nn.ModuleList:
    return nn.ModuleList(Block() for _ in range(count))


def formed(
    model: nn.Module, threshold: int = 0, leaves: Collection[nn.Module] = ()
) -> dict[str, GroupMembers]:
    """The groups by name, after checking what holds for every model."""
    groups = form_groups(model, threshold, leaves)
    params = list(model.named_parameters())
    members = [member for group in groups for member in group.params]
    assert sorted(index for index, _, _ in members) == list(range(len(params)))
    for index, name, param in members:
        assert params[index][0] == name
        assert params[index][1] is param
    for position, group in enumerate(groups):
        assert group.params
        assert [index for index, _, _ in group.params] == sorted(index for index, _, _ in group.params)
        assert bool(group.entries) is not group.persistent
        assert group.parent != position
        users = [
            module for module in model.modules() for p in module._parameters.values() if in_group(p, group)
        ]
        for user in users:
            inside = any(user is inner for entry in group.entries for inner in entry.modules())
            assert inside is not group.persistent, "a module could run without its parameters"
        # A group that can be open while this one is has to be counted with it.
        chain, at = set(), group.parent
        while at is not None:
            assert at not in chain
            chain.add(at)
            at = groups[at].parent
        for other_position, other in enumerate(groups):
            encloses = any(
                entry in set(outer.modules()) for outer in other.entries for entry in group.entries
            )
            assert not encloses or other is group or other_position in chain
    by_name = {group.name: group for group in groups}
    assert len(by_name) == len(groups)
    return by_name


def in_group(param: nn.Parameter | None, group: GroupMembers) -> bool:
    return any(param is member for _, _, member in group.params)


def names(group: GroupMembers) -> list[str]:
    return [name for _, name, _ in group.params]


def test_blocks_a_large_embedding_and_the_rest() -> None:
    model = Model(embed=nn.Embedding(1000, 8), layers=blocks(), norm=nn.LayerNorm(8), head=nn.Linear(8, 1000))
    groups = formed(model)
    assert list(groups) == ["embed", "layers.0", "layers.1", "layers.2", "root", "head"]
    assert names(groups["layers.1"]) == [f"layers.1.{name}" for name, _ in Block().named_parameters()]
    assert groups["layers.1"].entries == [model.layers[1]]
    assert names(groups["root"]) == ["norm.weight", "norm.bias"]
    assert groups["root"].entries == [model]
    assert [group.parent for group in groups.values()] == [4, 4, 4, 4, None, 4]


def test_what_is_no_larger_than_a_block_joins_the_root() -> None:
    size = sum(p.numel() for p in Block().parameters())
    for numel, own in ((size, False), (size + 1, True)):
        model = Model(embed=nn.Embedding(numel, 1), layers=blocks())
        assert ("embed" in formed(model)) is own
        assert ("root" in formed(model)) is not own


def test_without_a_root_group_there_is_no_parent() -> None:
    groups = formed(Model(layers=blocks(2)))
    assert [(name, group.parent) for name, group in groups.items()] == [
        ("layers.0", None),
        ("layers.1", None),
    ]


def test_a_model_without_repetition_is_one_group() -> None:
    model = Model(embed=nn.Embedding(1000, 8), head=nn.Linear(8, 2))
    groups = formed(model)
    assert {name: names(group) for name, group in groups.items()} == {
        "root": ["embed.weight", "head.weight", "head.bias"]
    }
    assert groups["root"].entries == [model]


def test_a_sequential_of_one_kind_repeats() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    groups = formed(model)
    assert list(groups) == ["0", "2"]
    assert groups["2"].entries == [model[2]]


def test_a_sequential_of_mixed_kinds_does_not() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    assert {name: len(group.params) for name, group in formed(model).items()} == {"root": 6}


def test_one_entry_does_not_repeat() -> None:
    assert list(formed(Model(layers=nn.ModuleList([Block(), nn.Identity()])))) == ["root"]


def test_the_outermost_repetition_counts() -> None:
    towers = nn.ModuleList(Model(layers=blocks(2)) for _ in range(2))
    assert list(formed(Model(towers=towers))) == ["towers.0", "towers.1"]


def test_a_list_of_lists_has_the_inner_entries_as_blocks() -> None:
    """Nobody calls a list, so no hook on it would ever run."""
    stages = nn.ModuleList(nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]) for _ in range(2))
    groups = formed(Model(stages=stages))
    assert list(groups) == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]
    assert [group.entries for group in groups.values()] == [[m] for stage in stages for m in stage]


def test_each_container_is_looked_for_on_its_own() -> None:
    model = Model(encoder=Model(layers=blocks(2)), decoder=Model(layers=nn.Sequential(Block(), Block())))
    assert list(formed(model)) == [
        "encoder.layers.0",
        "encoder.layers.1",
        "decoder.layers.0",
        "decoder.layers.1",
    ]


def test_a_parent_is_the_innermost_group_around() -> None:
    outer = Model(table=nn.Parameter(torch.zeros(5000)), layers=blocks(2))
    model = Model(bias=nn.Parameter(torch.zeros(3)), outer=outer)
    groups = formed(model)
    assert {name: group.parent for name, group in groups.items()} == {
        "root": None,
        "outer": 0,
        "outer.layers.0": 1,
        "outer.layers.1": 1,
    }


def test_small_parameters_persist_wherever_they_are() -> None:
    model = Model(scale=nn.Parameter(torch.zeros(())), layers=blocks(2), norm=nn.LayerNorm(8))
    groups = formed(model, threshold=9)
    assert names(groups["persistent"]) == [
        name for name, param in model.named_parameters() if param.numel() < 9
    ]
    assert (groups["persistent"].persistent, groups["persistent"].parent) == (True, None)
    assert set(groups) == {"persistent", "layers.0", "layers.1"}
    # The norm is as large as the threshold.
    assert "layers.0.norm.weight" in names(formed(model, threshold=8)["layers.0"])
    assert list(formed(model, threshold=1 << 20)) == ["persistent"]


def tied(*, bias: bool = False) -> Model:
    head = nn.Linear(8, 100, bias=bias)
    model = Model(embed=nn.Embedding(100, 8), layers=blocks(), head=head)
    head.weight = model.embed.weight
    return model


def test_a_tied_head_is_an_entry_of_the_embedding() -> None:
    model = tied()
    groups = formed(model)
    assert list(groups) == ["embed", "layers.0", "layers.1", "layers.2"]
    assert names(groups["embed"]) == ["embed.weight"]
    assert groups["embed"].entries == [model.embed, model.head]


def test_what_a_tied_head_has_of_its_own_joins_the_root() -> None:
    """A group of its own would be open together with the embedding's, and nothing would have made room for both."""
    model = tied(bias=True)
    groups = formed(model)
    assert names(groups["root"]) == ["head.bias"]
    assert groups["embed"].entries == [model.embed, model.head]
    assert list(groups)[groups["embed"].parent or 0] == "root"


def test_tied_to_a_group_around_needs_no_entry() -> None:
    model = Model(small=nn.Linear(4, 4), layers=blocks(), other=nn.Linear(4, 4))
    model.other.weight = model.small.weight
    groups = formed(model)
    assert groups["root"].entries == [model]
    assert names(groups["root"]) == ["small.weight", "small.bias", "other.bias"]


def test_a_parameter_tied_across_blocks_belongs_to_the_group_around_them() -> None:
    model = Model(layers=blocks(3))
    model.layers[2].up.weight = model.layers[0].up.weight
    groups = formed(model)
    assert names(groups["root"]) == ["layers.0.up.weight"]
    assert groups["root"].entries == [model]
    for index in range(3):
        assert groups[f"layers.{index}"].entries == [model.layers[index]]
    nested = formed(Model(bias=nn.Parameter(torch.zeros(3)), deep=nested_tie()))
    assert names(nested["deep"]) == ["deep.table", "deep.layers.0.up.weight"]


def nested_tie() -> Model:
    outer = Model(table=nn.Parameter(torch.zeros(5000)), layers=blocks(2))
    outer.layers[1].up.weight = outer.layers[0].up.weight
    return outer


def test_a_parameter_tied_inside_a_block_stays_there() -> None:
    model = Model(layers=blocks(2))
    model.layers[0].norm.bias = model.layers[0].down.bias
    assert list(formed(model)) == ["layers.0", "layers.1"]


def test_a_persistent_tied_parameter_needs_no_entry() -> None:
    groups = formed(tied(), threshold=801)
    assert set(groups) == {"persistent"}
    assert names(groups["persistent"]).count("embed.weight") == 1


def test_a_module_under_two_names_goes_by_the_first() -> None:
    shared = blocks(2)
    model = Model(a=Model(layers=shared), b=Model(layers=shared, own=nn.Linear(2, 2)))
    groups = formed(model)
    assert {name: len(group.params) for name, group in groups.items()} == {
        "a.layers.0": 6,
        "a.layers.1": 6,
        "root": 2,
    }


def test_trained_and_frozen_parameters_of_a_module_are_groups_beside_each_other() -> None:
    model = Model(embed=nn.Embedding(1000, 8), layers=blocks(2), norm=nn.LayerNorm(9)).requires_grad_(False)
    trained = {*model.layers[0].down.parameters(), model.norm.bias}
    groups = form_groups(model, 9, trained=trained)
    assert [(group.name, group.beside, group.parent, names(group)) for group in groups] == [
        ("embed", None, 6, ["embed.weight"]),
        ("persistent", None, None, [name for name, p in model.named_parameters() if p.numel() < 9]),
        ("layers.0 (frozen)", 3, 6, ["layers.0.up.weight", "layers.0.up.bias"]),
        ("layers.0", 2, 6, ["layers.0.down.weight"]),
        ("layers.1", None, 6, [f"layers.1.{name}" for name in ("up.weight", "up.bias", "down.weight")]),
        ("root (frozen)", 6, None, ["norm.weight"]),
        ("root", 5, None, ["norm.bias"]),
    ]
    assert groups[2].entries == groups[3].entries == [model.layers[0]]
    assert groups[5].entries == groups[6].entries == [model]


@pytest.mark.parametrize("name", ["root", "persistent"])
def test_a_module_may_have_a_name_of_ours(name: str) -> None:
    model = Model(**{name: nn.Embedding(1000, 8)}, layers=blocks(2), norm=nn.LayerNorm(9))
    shapes = [(group.persistent, names(group), group.entries) for group in form_groups(model, 9)]
    small = [member for member, param in model.named_parameters() if param.numel() < 9]
    assert (False, [f"{name}.weight"], [getattr(model, name)]) in shapes
    assert (False, ["norm.weight", "norm.bias"], [model]) in shapes
    assert (True, small, []) in shapes
    assert len(shapes) == 5


def test_a_module_shared_by_blocks_belongs_to_the_group_around_them() -> None:
    class Sharing(nn.Module):
        def __init__(self, shared: nn.Module) -> None:
            super().__init__()
            self.own = nn.Linear(8, 8)
            self.shared = shared

    shared = nn.Linear(8, 8)
    model = nn.Sequential(*(Sharing(shared) for _ in range(3)))
    groups = {group.name: group for group in form_groups(model, 0)}
    assert [name for _, name, _ in groups["root"].params] == ["0.shared.weight", "0.shared.bias"]
    assert groups["root"].entries == [model]
    for block in ("0", "1", "2"):
        assert [name for _, name, _ in groups[block].params] == [f"{block}.own.weight", f"{block}.own.bias"]


class Experts(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))


def routed(count: int = 2) -> Model:
    """Blocks of a linear layer and routed experts, between an embedding and a head of their own size."""
    layers = nn.ModuleList(Model(mix=nn.Linear(8, 8), moe=Experts()) for _ in range(count))
    return Model(embed=nn.Embedding(64, 8), layers=layers, head=nn.Linear(8, 64))


def numel(group: GroupMembers) -> int:
    return sum(param.numel() for _, _, param in group.params)


def test_a_leaf_module_is_one_group_with_everything_inside() -> None:
    model = routed()
    leaves = leaf_modules(model, LeafModulesConfig(classes=["Experts"]))
    groups = formed(model, 0, leaves)
    assert set(groups) == {"embed", "head", "layers.0", "layers.0.moe", "layers.1", "layers.1.moe"}
    for block in ("layers.0", "layers.1"):
        inside = groups[f"{block}.moe"]
        assert numel(inside) == (8 * 4 + 4) + 4 * (8 * 8 + 8)
        assert inside.entries == [model.get_submodule(f"{block}.moe")]
        assert list(groups).index(block) == inside.parent
        assert [name for _, name, _ in groups[block].params] == [f"{block}.mix.weight", f"{block}.mix.bias"]
    assert set(formed(model)) == {"embed", "head", "layers.0", "layers.1"}


def test_experts_that_repeat_on_their_own_are_blocks_unless_a_leaf_holds_them() -> None:
    model = Model(moe=Experts(), out=nn.Linear(8, 2))
    assert set(formed(model)) == {"root", *(f"moe.experts.{i}" for i in range(4))}
    assert set(formed(model, 0, [model.moe])) == {"root", "moe"}
    # whole blocks, and what they are made of
    everything = formed(routed(), 0, [])
    whole = routed()
    assert set(formed(whole, 0, [whole.layers[0], whole.layers[0].moe])) == set(everything)
    assert set(formed(whole, 0, [whole])) == {"root"}


def test_frozen_experts_of_a_block_are_groups_inside_of_it() -> None:
    """What is trained of an expert belongs to the block. Unequal modules, and those in a leaf, are no experts."""
    model = routed()
    trained = {model.layers[0].mix.weight, model.layers[0].moe.experts[2].weight}
    groups = {group.name: group for group in form_groups(model, 0, trained=trained, routed=True)}
    blocks = {"layers.0", "layers.0 (frozen)", "layers.1"}
    experts = [f"layers.{layer}.moe.experts.{number}" for layer in range(2) for number in range(4)]
    assert set(groups) == {"embed", "head", *blocks, *experts}
    names = list(groups)
    for expert in experts:
        block, number = expert[:8], int(expert[-1])
        held = ["bias"] if (block, number) == ("layers.0", 2) else ["weight", "bias"]
        assert [name for _, name, _ in groups[expert].params] == [f"{expert}.{each}" for each in held]
        assert groups[expert].entries == [model.get_submodule(expert)]
        assert groups[expert].routing == Routing(f"{block}.moe.experts", 4)
        assert (groups[expert].parent, groups[expert].beside) == (names.index(block), None)
    assert not any(groups[name].routing for name in ("embed", "head", *blocks))
    assert {param for _, _, param in groups["layers.0"].params} == trained

    leaf = form_groups(model, 0, [model.layers[0].moe], trained=(), routed=True)
    assert {group.name for group in leaf if group.routing} == set(experts[4:])
    for layer in model.layers:
        layer.moe.experts[0] = nn.Linear(8, 9)
    assert not any(group.routing for group in form_groups(model, 0, trained=(), routed=True))
    assert not any(group.routing for group in form_groups(routed(), 0, trained=()))


def test_frozen_fused_experts_are_one_group_that_no_call_unshards() -> None:
    """Unless they are in a leaf, train, are compiled, or below another module's base layer."""

    def build() -> Model:
        layers = (Model(mix=nn.Linear(8, 8), moe=Fused(4, 8, grouped=True)) for _ in range(5))
        model = Model(layers=nn.ModuleList(layers))
        model.layers[1].moe.down_proj.requires_grad_(True)
        model.layers[3].moe = Model(base_layer=model.layers[3].moe)
        return model

    model = build()
    model.layers[4].moe._compiled_call_impl = model.layers[
        4
    ].moe.forward  # as compile() does, without a compiler
    trained = {model.layers[1].moe.down_proj}
    groups = {
        group.name: group
        for group in form_groups(model, 0, [model.layers[2].moe], trained=trained, routed=True)
    }
    fused = {name: group for name, group in groups.items() if group.routing is not None}
    assert set(fused) == {"layers.0.moe", "layers.1.moe"}
    assert [name for _, name, _ in fused["layers.0.moe"].params] == [
        "layers.0.moe.up_proj", "layers.0.moe.down_proj",
    ]  # fmt: skip
    assert [name for _, name, _ in fused["layers.1.moe"].params] == ["layers.1.moe.up_proj"]
    assert fused["layers.0.moe"].routing == Routing("layers.0.moe", 4, fused=True)
    for name, group in fused.items():
        assert group.entries == []
        assert group.parent == list(groups).index(name[:8])
    assert numel(groups["layers.2.moe"]) == 2 * 4 * 8 * 8
    for block in ("layers.3", "layers.4"):
        assert numel(groups[block]) == 8 * 8 + 8 + 2 * 4 * 8 * 8
    assert not any(group.routing for group in form_groups(build(), 0, trained=trained))


def test_fused_codes_inside_of_a_wrapper_move_with_their_block() -> None:
    layers = (Model(mix=nn.Linear(8, 8), moe=Fused(4, 32, grouped=True)) for _ in range(2))
    model = Model(layers=nn.ModuleList(layers))
    codes = InnerTensor(model.layers[1].moe.down_proj.data, requires_grad=False)
    model.layers[1].moe.down_proj = codes
    groups = form_groups(model, 0, trained=set(), routed=True)
    (fused,) = (group for group in groups if group.name == "layers.1.moe")
    assert [name for _, name, _ in fused.params] == ["layers.1.moe.up_proj"]
    (block,) = (group for group in groups if any(param is codes for _, _, param in group.params))
    assert block.routing is None and block.entries == [model.layers[1]]


def test_small_parameters_of_a_leaf_persist_as_others_do() -> None:
    model = routed()
    groups = formed(model, 9, leaf_modules(model, LeafModulesConfig(name_suffixes="moe")))
    assert numel(groups["persistent"]) == 2 * (8 + 4 + 4 * 8)
    assert numel(groups["layers.1.moe"]) == 8 * 4 + 4 * 8 * 8


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"classes": ["Experts"]}, {"layers.0.moe", "layers.1.moe"}),
        ({"classes": [f"{Experts.__module__}.Experts"]}, {"layers.0.moe", "layers.1.moe"}),
        ({"names": ["layers.1", "head"]}, {"layers.1", "head"}),
        ({"name_suffixes": [".moe", "mbed"]}, {"layers.0.moe", "layers.1.moe", "embed"}),
        ({"classes": "Embedding", "names": "layers.0.mix"}, {"embed", "layers.0.mix"}),
        ({}, set()),
    ],
)
def test_leaf_modules_are_found_by_class_name_and_suffix(
    settings: dict[str, object], expected: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = routed()
    modules = leaf_modules(model, LeafModulesConfig.model_validate(settings))
    assert {name for name, module in model.named_modules() if module in modules} == expected
    assert not caplog.records


def test_leaf_modules_that_match_nothing_are_told(caplog: pytest.LogCaptureFixture) -> None:
    settings = LeafModulesConfig(classes=["Experts", "MixtralSparseMoeBlock"], names=["layers.7"])
    with caplog.at_level(logging.WARNING):
        assert len(leaf_modules(routed(), settings)) == 2
    assert caplog.messages == ["leaf_module: no module of the model matches MixtralSparseMoeBlock, layers.7"]
    with pytest.raises(ConfigError, match=r"names 'layers.0.moe.experts', but a ModuleList is never called"):
        leaf_modules(routed(), LeafModulesConfig(name_suffixes=["experts"]))
