"""Build on meta, fill group by group: ``tiering.zero.Init``, and how a model's values reach their tiers.

    with tiering.zero.Init():
        model = Model()                  # parameters without memory
    engine, *_ = tiering.initialize(model=model, config=config)

Each module's ``reset_parameters`` then runs in the order of an ordinary build, and a group goes to its tiers as soon as
its last parameter has a value; only groups in the making take memory. A parameter that gets its value elsewhere (in
``__init__``, or by ``model.apply``) would silently lose it: that is detected and refused.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from optim_cpu.formats import round_parameters
from tiering.errors import ConfigError, EngineStateError
from zero3.collectives import Collectives
from zero3.param_group import ParamGroup
from zero3.partition import QUANTUM, Piece, segments, tiles
from zero3.tiers import Tiers
from zero3.tiles import StateLayout, Tile


class Init:
    """Within this context, parameters are created on the meta device: shape and dtype, no memory. Buffers are real.

    ``config`` is accepted for DeepSpeed's sake; nothing in it matters before ``initialize``. Not reentrant: the context
    replaces ``nn.Module.register_parameter`` for the process while it is open.
    """

    _register = nn.Module.register_parameter

    def __init__(self, module: nn.Module | None = None, *, config: Any = None) -> None:
        if module is not None:
            raise ConfigError(
                "zero.Init(module=...) is not supported in this version: build the model inside the context"
            )

    def __enter__(self) -> Self:
        if nn.Module.register_parameter is not Init._register:
            raise EngineStateError("zero.Init is open already: build the whole model in one context")
        nn.Module.register_parameter = _register_on_meta  # type: ignore[method-assign,assignment] # replaced on purpose
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        nn.Module.register_parameter = Init._register  # type: ignore[method-assign]


def _register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    if param is not None and not param.is_meta:
        param = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
    Init._register(module, name, param)


def fill(
    model: nn.Module,
    groups: list[ParamGroup],
    optimizer_tiles: list[Tile],
    tiers: Tiers,
    layout: StateLayout,
    initial_state: Mapping[nn.Parameter, float],
    collectives: Collectives | None = None,
) -> None:
    """Send every parameter's value to its group's home and, as fp32, to the masters; what else is state starts as
    ``initial_state`` says, or as zero. Ranks that train together all take rank 0's values.

    Afterwards the model's parameters belong to their groups.
    """
    starts = {
        piece.index: initial_state[param]
        for group in groups
        for piece, param in zip(group.layout.pieces, group.params, strict=True)
        if initial_state.get(param)
    }
    missing = {group: sum(param.is_meta for param in group.params) for group in groups}
    owner = {param: group for group in groups for param in group.params}
    expected: dict[nn.Parameter, int] = {}  # how often the ordinary build wrote the parameter
    for group, count in missing.items():
        if count == 0:
            _store(group, optimizer_tiles, tiers, layout, starts, collectives)
    for module in _children_first(model):
        filled = _materialize(module)
        expected.update(filled)
        for param in filled:
            missing[owner[param]] -= 1
        for group in {owner[param]: None for param in filled}:
            if missing[group] == 0:
                _check_repeated(group, expected)
                _store(group, optimizer_tiles, tiers, layout, starts, collectives)
    tiers.staging.drain()


def _trim_heap() -> None:
    """Give the memory of the original parameters back to the system, where the C library (glibc) keeps it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _check_repeated(group: ParamGroup, expected: dict[nn.Parameter, int]) -> None:
    """Every write of the ordinary build was repeated by a ``reset_parameters``; a tensor counts its writes."""
    for piece, param in zip(group.layout.pieces, group.params, strict=True):
        if param in expected and (param._version == 0 or param._version != expected[param]):
            raise ConfigError(
                f"{piece.name} was initialised outside reset_parameters (in a constructor, or by apply), which"
                " zero.Init cannot repeat; move that into the module's reset_parameters, or build this model"
                " without zero.Init"
            )


def _store(
    group: ParamGroup,
    optimizer_tiles: list[Tile],
    tiers: Tiers,
    layout: StateLayout,
    starts: Mapping[int, float],
    collectives: Collectives | None,
) -> None:
    """Write what this rank keeps of the group: parameters in the compute dtype, and the state of its tiles."""
    values = {
        piece.index: param.detach().flatten().cpu()
        for piece, param in zip(group.layout.pieces, group.params, strict=True)
    }
    if collectives is not None:
        for piece in group.layout.pieces:
            if collectives.world.rank:
                values[piece.index] = values[piece.index].clone()  # it may be the user's own
            collectives.broadcast(values[piece.index], 0, f"send the first value of {piece.name!r}")
    kept, itemsize = group.shard if group.sharded else group.layout, group.dtype.itemsize
    chunk = (
        tiers.chunk_bytes // itemsize // QUANTUM * QUANTUM if tiers.chunk_bytes else kept.numel
    ) or QUANTUM
    for start, end in tiles(kept.numel, chunk):
        with tiers.writing(group.home, start * itemsize, (end - start) * itemsize) as raw:
            raw.zero_()
            _place(values, kept.pieces, start, end, raw.view(group.dtype))
    for tile in optimizer_tiles:
        if tile.group is group:
            with tiers.writing(tile.state, 0, tile.numel * layout.itemsize) as raw:
                raw.zero_()
                _place_state(tile, layout, values, starts, raw)
    for param in group.params:
        param.grad = None
    group.adopt_parameters()
    del values
    _trim_heap()  # after each group, or the originals of all of them would stay resident


def _place_state(
    tile: Tile, layout: StateLayout, values: dict[int, Tensor], starts: Mapping[int, float], raw: Tensor
) -> None:
    """Set the masters in the state ``raw`` of a tile, and the moments of the parameters that do not start from zero."""
    for segment in tile.segments:
        inside, piece = segment.start - tile.start, segment.piece
        if layout.master_itemsize:
            masters = values[piece.index][segment.first : segment.first + segment.numel].float()
            kept = raw[inside * layout.master_itemsize :][: segment.numel * layout.master_itemsize]
            layout.store_master(masters, kept)
        if piece.index in starts:
            start = torch.full((segment.numel,), starts[piece.index], device="cpu")
            for number in range(layout.moments):
                at = layout.moment_at(number, tile.numel, inside)
                layout.store_moment(start, raw[at : at + segment.numel * layout.moment_format.itemsize])


def _place(values: dict[int, Tensor], pieces: Sequence[Piece], start: int, end: int, into: Tensor) -> None:
    for segment in segments(pieces, start, end):
        source = values[segment.piece.index][segment.first : segment.first + segment.numel]
        round_parameters(source, into[segment.start - start :][: segment.numel])


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """Modules in the order in which constructors finish."""
    for child in module.children():
        yield from _children_first(child)
    yield module


def _materialize(module: nn.Module) -> dict[nn.Parameter, int]:
    """Give the module's own meta parameters memory and run its ``reset_parameters``.

    Returns them with the number of writes they had seen on meta.
    """
    absent = {
        short: param for short, param in module._parameters.items() if param is not None and param.is_meta
    }
    if not absent:
        return {}
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is None:
        raise ConfigError(
            f"{type(module).__name__} was built under zero.Init but has no reset_parameters to initialise"
            f" {', '.join(absent)}; give it one, or build this model without zero.Init"
        )
    writes = {param: param._version for param in absent.values()}
    for param in absent.values():
        real = nn.Parameter(torch.empty_like(param, device="cpu"), requires_grad=param.requires_grad)
        torch.utils.swap_tensors(param, real)
    reset()
    return writes
