"""Which modules form a ParamGroup: the parameters that are unsharded, stepped and swapped together.

The outermost entries of a repeated container (a ``ModuleList``, or a ``Sequential`` of one kind of module) are groups:
the blocks. Outside the blocks, a module whose own parameters exceed the average block (an embedding, an output head)
is a group of its own, and so is each tile of a layer there (row_tiles.py). Other parameters join the group of the
nearest ancestor, at last the root's. Parameters below the persistence threshold form one group that never leaves the
device. Parameters that stay fp32 are never in one group with 16-bit parameters; if a module has large parameters of
both kinds, those in fp32 do not leave the device either.

The experts of a block, four or more entries of one shape in a ``ModuleList`` or ``ModuleDict``, are groups of their own
as far as they are frozen: in one process, a pass then fetches those that it calls. What is trained of them belongs to
the block. Frozen parameters that hold all experts of a module of transformers (fused_experts.py) are one group, which
is fetched expert by expert.

Of a module that has trained and frozen parameters, as with adapters, the two kinds are groups beside each other, which
the same calls unshard: what a step writes may then live on a faster tier than what is only read.

A leaf module is one group (or two, see above) with all parameters inside, without a look at its modules: which of these
are called, and in which order, may then differ between ranks.

A tied parameter belongs to the first group that uses it, and every module that uses it becomes an *entry* of that
group: a call of the module unshards the group. If the users are in groups side by side (two blocks), the parameter
belongs to the group around them instead: a block that unshards another block's group would need room for both, and the
order of calls would not show backward when either block is finished.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import torch
from torch import nn

from tiering.config.training import LeafModulesConfig
from tiering.errors import ConfigError
from zero3.device.storages import can_close
from zero3.params.compilation import is_compiled
from zero3.params.fused_experts import experts_in
from zero3.params.inner_tensors import InnerTensor
from zero3.params.row_tiles import RowTiles, tile_modules

log = logging.getLogger(__name__)

ROOT = "root"
PERSISTENT = "persistent"
IN_FP32 = "persistent in fp32"
MARK = "_z3_leaf"
"""The attribute by which DeepSpeed's functions mark leaf modules; copies of a model have it, too."""
NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
READS_INSIDE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules that read parameters of the modules inside of them, instead of calling these."""
FEWEST_EXPERTS = 4


@dataclass(frozen=True)
class Routing:
    """The experts among which a router chooses: ``count`` groups in ``container``, the name of a module.

    If they are ``fused``, one group has all parameters, and the experts are its slices.
    """

    container: str
    count: int
    fused: bool = False


@dataclass
class GroupMembers:
    """A group before it has storage: ``params`` are (index in the model, name, parameter), in model order."""

    name: str
    params: list[tuple[int, str, nn.Parameter]] = field(default_factory=list)
    entries: list[nn.Module] = field(default_factory=list)
    parent: int | None = None
    # The index of the other group of the same modules: one is trained, the other frozen.
    beside: int | None = None
    persistent: bool = False
    # Whether the group is fp32 in a model that computes in 16 bits.
    in_fp32: bool = False
    # The experts to which the group belongs: not every pass uses it.
    routing: Routing | None = None


class _Key(NamedTuple):
    """The parameters of ``anchor``, the name of a module, that form one group."""

    anchor: str
    persistent: bool
    in_fp32: bool
    frozen: bool


def computes_backward(module: nn.Module) -> bool:
    """Whether the backward of ``module`` may read its parameters. A frozen embedding, of indices, has no backward."""
    return type(module) is not nn.Embedding or module.weight.requires_grad


def form_groups(
    model: nn.Module,
    persistence_threshold: int,
    leaves: Collection[nn.Module] = (),
    kept_in_fp32: Collection[nn.Parameter] = (),
    trained: Collection[nn.Parameter] | None = None,
    *,
    routed: bool = False,
    largest: int | None = None,
    together: int = 0,
) -> list[GroupMembers]:
    """Cut ``model`` into groups, in the order of its modules; every parameter is in exactly one.

    ``persistence_threshold`` counts elements: smaller parameters go to the persistent group, whatever their module.
    Parameters that are ``kept_in_fp32`` form groups of their own. Frozen parameters, which are not in ``trained``
    (default: all parameters), do so beside the trained parameters of the same module: only the latter are written.
    With ``routed``, the frozen parameters of each expert in a block are a group, and so are those that hold all experts
    of a module. A block with more than ``largest`` elements is cut: each module inside of it that owns parameters is a
    group of its own, as far as the modules around it call it; and so is a larger module outside of the blocks. A module
    with fewer parameters than ``together`` per module in it is not cut.
    """
    modules, users, blocks = dict(model.named_modules()), _users(model), block_names(model)
    leaf_names = {name for name, module in modules.items() if module in leaves}
    anchors = {"", *blocks, *leaf_names, *_outside(modules, users, blocks, leaf_names)}
    if largest is not None:
        anchors |= set(_modules_to_cut(modules, users, blocks - leaf_names, largest, together))
    anchors = {name for name in anchors if not any(around in leaf_names for around in _around(name))}
    blocks |= leaf_names
    routing = _experts(modules, blocks, leaf_names) if routed else {}
    # One expert makes way for the next while the module runs: a read of a kept one must raise an error.
    fused = _fused_experts(modules, blocks, leaf_names) if routed and can_close() else {}

    def is_small(param: nn.Parameter) -> bool:
        # Without elements there is nothing to move.
        few = param.numel() < max(1, persistence_threshold)
        return few or (isinstance(param, InnerTensor) and param.is_tiny)

    # A module has one group that is unsharded with it. If this group is in 16 bits, its fp32 parameters stay resident.
    in_16_bits = {
        _anchor_of(names, anchors) for p, names in users.items() if p not in kept_in_fp32 and not is_small(p)
    }
    groups: dict[_Key, GroupMembers] = {}
    owner: dict[nn.Parameter, GroupMembers] = {}
    index = 0
    for module_name, module in modules.items():
        for short, param in module._parameters.items():
            if param is None:
                continue
            if param in owner:
                _add_entry(owner[param], module, modules)
                continue
            anchor, in_fp32 = _anchor_of(users[param], anchors), param in kept_in_fp32
            persistent = is_small(param) or (in_fp32 and anchor in in_16_bits)
            if persistent:
                anchor = ""
            # Persistent parameters live in one place, written or not.
            frozen = trained is not None and param not in trained and not persistent
            if frozen:
                anchor = _anchor_of(users[param], anchors | routing.keys())
            experts = fused.get(param) if frozen and not in_fp32 and len(users[param]) == 1 else None
            if experts is not None:
                anchor = experts.container
            group = groups.setdefault(
                _Key(anchor, persistent, in_fp32, frozen),
                GroupMembers(
                    _label(anchor, persistent, in_fp32),
                    persistent=persistent,
                    in_fp32=in_fp32,
                    routing=experts or routing.get(anchor),
                ),
            )
            # A call of a module with fused experts uses only some of them.
            if not persistent and not group.entries and experts is None:
                group.entries.append(modules[anchor])
            group.params.append((index, f"{module_name}.{short}" if module_name else short, param))
            owner[param] = group
            index += 1
    _link(groups, modules)
    return list(groups.values())


def _outside(
    modules: dict[str, nn.Module],
    users: dict[nn.Parameter, list[str]],
    blocks: Collection[str],
    leaves: Collection[str],
) -> Iterator[str]:
    """The names of the tiles outside of ``blocks`` and ``leaves``, and of modules there that exceed the mean block."""
    mean_block, tiles = _mean_block_size(modules, blocks), tile_modules(modules.values())
    inside = {*blocks, *leaves}
    for name, module in modules.items():
        own = _first_used(name, module, users)
        is_large = bool(mean_block) and own > mean_block
        if name and own and (is_large or module in tiles) and not _inside(name, inside):
            yield name


def _first_used(name: str, module: nn.Module, users: dict[nn.Parameter, list[str]]) -> int:
    """The elements of the parameters that ``module`` holds and no module before it."""
    return sum(param.numel() for param in _own(module) if users[param][0] == name)


def _modules_to_cut(
    modules: dict[str, nn.Module],
    users: dict[nn.Parameter, list[str]],
    blocks: Collection[str],
    largest: int,
    together: int,
) -> Iterator[str]:
    """The names of modules that own parameters, inside of blocks with more than ``largest`` elements or outside of all.

    Instead of a module inside of one whose parameters are used together, or inside of one of a block with fewer than
    ``together`` per module, that one. Outside of ``blocks``, only modules with more than ``largest`` elements.
    """
    sizes = {name: sum(param.numel() for param in modules[name].parameters()) for name in blocks}

    # A layer may have thousands of tiles, each with the same modules around it.
    @cache
    def is_whole(name: str, *, in_block: bool) -> bool:
        return _is_one(modules[name]) or (in_block and _granularity(modules[name]) < together)

    for name, module in modules.items():
        own = _first_used(name, module, users)
        around = [each for each in _ancestors(name) if each]
        block = next((each for each in around if each in blocks), None)
        if not name or not own or (own if block is None else sizes[block]) <= largest:
            continue
        inside = around if block is None else around[: around.index(block) + 1]
        whole = [each for each in inside if is_whole(each, in_block=block is not None)]
        yield whole[-1] if whole else name


def _is_one(module: nn.Module) -> bool:
    """Whether the parameters inside of ``module`` are used together: a layer with adapters is one layer."""
    adapted = getattr(module, "base_layer", None)
    is_one_layer = adapted is not None and not isinstance(adapted, RowTiles)
    return isinstance(module, READS_INSIDE) or is_compiled(module) or is_one_layer


def _granularity(module: nn.Module) -> float:
    """Parameters per module, counting those inside of ``module`` and itself."""
    return sum(param.numel() for param in module.parameters()) / sum(1 for _ in module.modules())


def block_names(model: nn.Module) -> set[str]:
    """The names of the blocks of ``model``. A module that is registered twice goes by its first name."""
    names = {name for name, _ in model.named_modules()}
    return {name for container in _repeated_containers(model) for name in container if name in names}


def _label(anchor: str, persistent: bool, in_fp32: bool) -> str:
    if not persistent:
        return anchor or ROOT
    return IN_FP32 if in_fp32 else PERSISTENT


def leaf_modules(model: nn.Module, config: LeafModulesConfig) -> set[nn.Module]:
    """The modules of ``model`` that ``config`` names, as DeepSpeed's leaf_module does, and those with a ``MARK``."""
    matching: set[nn.Module] = set()
    unmatched = {*config.classes, *config.names, *config.name_suffixes}
    for name, module in model.named_modules(remove_duplicate=False):
        kind = type(module)
        titles = {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}
        matched = titles.intersection(config.classes) | {name}.intersection(config.names)
        matched |= {suffix for suffix in config.name_suffixes if name.endswith(suffix)}
        marked = bool(getattr(module, MARK, False))
        if (matched or marked) and isinstance(module, NEVER_CALLED):
            raise ConfigError(
                f"leaf_module names {name!r}, but a {kind.__name__} is never called, so its parameters would not be"
                " unsharded; name the module around it"
            )
        if matched or marked:
            matching.add(module)
            unmatched -= matched
    if unmatched:
        log.warning("leaf_module: no module of the model matches %s", ", ".join(sorted(unmatched)))
    return matching


def _repeated_containers(model: nn.Module) -> Iterator[list[str]]:
    """The names of the entries of the outermost repeated containers."""
    queue: list[tuple[str, nn.Module]] = [("", model)]
    while queue:
        prefix, module = queue.pop(0)
        children = [
            (f"{prefix}.{short}" if prefix else short, child) for short, child in module.named_children()
        ]
        entries = [(name, child) for name, child in children if any(True for _ in child.parameters())]
        repeated = len(entries) > 1 and (
            isinstance(module, nn.ModuleList)
            or (isinstance(module, nn.Sequential) and len({type(child) for _, child in entries}) == 1)
        )
        if repeated:
            yield from _callable_entries(entries)
        else:
            # Tiles are parts of a layer, whether there is another layer or not.
            queue += [(name, child) for name, child in children if not isinstance(child, RowTiles)]


def _callable_entries(entries: list[tuple[str, nn.Module]]) -> Iterator[list[str]]:
    """The names of ``entries``; one that is never called (a list of lists of layers) is replaced by its entries."""
    for name, module in entries:
        if isinstance(module, NEVER_CALLED):
            children = [(f"{name}.{short}", child) for short, child in module.named_children()]
            yield from _callable_entries([(n, c) for n, c in children if any(True for _ in c.parameters())])
        else:
            yield [name]


def _experts(
    modules: dict[str, nn.Module], blocks: Collection[str], leaves: Collection[str]
) -> dict[str, Routing]:
    """The experts inside of ``blocks`` and outside of ``leaves``, by name. An expert has no experts inside."""
    found: dict[str, Routing] = {}
    for name, module in modules.items():
        if not isinstance(module, nn.ModuleList | nn.ModuleDict) or not _inside(name, blocks):
            continue
        if _inside(name, leaves) or _inside(name, found):
            continue
        entries = [
            f"{name}.{short}" for short, child in module.named_children() if f"{name}.{short}" in modules
        ]
        shapes = {_shape_of(modules[entry]) for entry in entries}
        if (
            len(entries) >= FEWEST_EXPERTS
            and len(shapes) == 1
            and not isinstance(modules[entries[0]], NEVER_CALLED)
        ):
            found.update(dict.fromkeys(entries, Routing(name, len(entries))))
    return found


def _fused_experts(
    modules: dict[str, nn.Module], blocks: Collection[str], leaves: Collection[str]
) -> dict[nn.Parameter, Routing]:
    """The parameters that hold the matrices of several experts, inside of ``blocks`` and outside of ``leaves``."""
    found: dict[nn.Parameter, Routing] = {}
    for name, module in modules.items():
        count = experts_in(module)
        if count < FEWEST_EXPERTS or name in blocks or not _inside(name, blocks) or _inside(name, leaves):
            continue
        # Compiled code around the module reads whole parameters, and so does the module around a base layer.
        if any(is_compiled(modules[around]) for around in _ancestors(name)) or name.endswith(".base_layer"):
            continue
        for param in _own(module):
            # A wrapper around it reads it whole.
            if isinstance(param, InnerTensor):
                continue
            matrices = param.dim() == 3 or (param.dim() == 2 and not param.is_floating_point())  # or codes
            # An expert begins at a multiple of four elements, which no dtype divides.
            if matrices and param.shape[0] == count and param.numel() // count % 4 == 0:
                found[param] = Routing(name, count, fused=True)
    return found


def _shape_of(module: nn.Module) -> tuple[type[nn.Module], tuple[tuple[str, torch.Size], ...]]:
    return type(module), tuple((name, param.shape) for name, param in module.named_parameters())


def _mean_block_size(modules: dict[str, nn.Module], blocks: Collection[str]) -> float:
    sizes = [sum(p.numel() for p in modules[name].parameters()) for name in blocks]
    return sum(sizes) / len(sizes) if sizes else 0.0


def _own(module: nn.Module) -> Iterator[nn.Parameter]:
    return (param for param in module._parameters.values() if param is not None)


def _users(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """The names of the modules that hold each parameter, in model order: several if it, or its module, is shared."""
    users: dict[nn.Parameter, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for param in _own(module):
            users.setdefault(param, []).append(name)
    return users


def _anchor_of(users: list[str], anchors: set[str]) -> str:
    """The anchor of the group of a parameter that ``users`` hold."""
    first = _nearest(users[0], anchors)
    for user in users[1:]:
        anchor = _nearest(user, anchors)
        if first not in _ancestors(anchor) and anchor not in _ancestors(first):
            around = set.intersection(*(set(_ancestors(user)) for user in users))
            return _nearest(users[0], anchors & around)
    return first


def _ancestors(name: str) -> Iterator[str]:
    """``name`` and every module around it, innermost first; the root is ""."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _around(name: str) -> Iterator[str]:
    """The modules around ``name``, innermost first."""
    return (ancestor for ancestor in _ancestors(name) if ancestor != name)


def _inside(name: str, anchors: Collection[str]) -> bool:
    return any(ancestor in anchors for ancestor in _ancestors(name) if ancestor)


def _nearest(name: str, anchors: set[str]) -> str:
    return next(ancestor for ancestor in _ancestors(name) if ancestor in anchors)


def _add_entry(group: GroupMembers, module: nn.Module, modules: dict[str, nn.Module]) -> None:
    """``module`` uses a parameter of ``group``: make it an entry unless an entry already encloses it."""
    if group.persistent:
        return
    inside = any(module is inner for entry in group.entries for inner in entry.modules())
    if not inside:
        group.entries.append(module)


def _link(groups: dict[_Key, GroupMembers], modules: dict[str, nn.Module]) -> None:
    """Set the group beside each group, and its parent: the innermost other group, not beside it, around its modules.

    Of two groups beside each other, the trained one is the parent of those inside, because it may receive gradients.
    """
    index_of = {key: index for index, key in enumerate(groups)}
    owners: dict[nn.Module, int] = {}
    for key in sorted(groups, key=lambda key: not key.frozen):
        owners.update(dict.fromkeys(groups[key].entries, index_of[key]))
    for key, group in groups.items():
        if group.persistent:
            continue
        group.beside = index_of.get(key._replace(frozen=not key.frozen))
        if key.frozen and group.beside is not None:
            group.name = f"{group.name} (frozen)"
        for ancestor in _ancestors(key.anchor):
            parent = owners.get(modules[ancestor])
            if parent not in (None, index_of[key], group.beside):
                group.parent = parent
                break
