"""The activations of a model, counted in a forward whose tensors have no memory.

Torch's fake tensors have shapes, dtypes and a device, so the forward takes the kernels that it would take on a CPU: its
attention saves what the fused attention of a GPU saves. Nothing is computed and no memory is used.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint

from tiering.config.training import TieringConfig
from zero3.params.grouping import block_names
from zero3.params.precision import COMPUTE_DTYPES, autocast, cast_floating, keeps_dtype, kept_in_fp32

log = logging.getLogger(__name__)


def saved_bytes_of(model: nn.Module, config: TieringConfig, batch: Any) -> int | None:
    """The bytes that autograd saves in a forward of ``batch``, a micro-batch; None, with a warning, if it cannot run.

    ``batch`` has the arguments of the forward: a mapping of keywords, a tuple or list, or a single value. Its tensors
    may be on any device, also on meta. Parameters and buffers do not count. With activation checkpointing, of the model
    or by ``block_rows``, the inside of a block that backward computes again is unknown, and does not count either.
    """
    # Memory is all that the pass does without: any code of the model may run in it, and raise what it likes.
    try:
        with FakeTensorMode():
            return _saved_bytes(_without_memory(model, config), config, batch)
    except Exception as error:
        log.warning(
            "activations are not counted: a forward without memory raised %s: %s", type(error).__name__, error
        )
        return None


def _without_memory(model: nn.Module, config: TieringConfig) -> nn.Module:
    """A copy of ``model`` in the dtypes in which it computes. Called in a FakeTensorMode."""
    in_fp32 = kept_in_fp32(model, config)
    copies: dict[int, Any] = {id(each): _empty(each, each.dtype) for each in model.buffers()}
    for param in model.parameters():
        cast = param.is_floating_point() and not keeps_dtype(param)
        dtype = torch.float32 if param in in_fp32 else COMPUTE_DTYPES[config.precision]
        fake = _empty(param, dtype if cast else param.dtype)
        copies[id(param)] = nn.Parameter(fake, requires_grad=param.requires_grad)
    copied = copy.deepcopy(model, copies)
    if config.tiering.block_rows is not None:
        for name in block_names(copied):
            block = copied.get_submodule(name)
            block.forward = partial(_with_inputs_saved, block.forward)
    return copied


def _with_inputs_saved(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The output of ``forward``, of which autograd saves the inputs alone, as of a block over chunks of rows."""
    leaves, structure = tree_flatten((args, kwargs))

    def run(*leaves: Any) -> Any:
        args, kwargs = tree_unflatten(leaves, structure)
        return forward(*args, **kwargs)

    # Torch does not save keyword arguments.
    return checkpoint(run, *leaves, use_reentrant=False)


def _saved_bytes(model: nn.Module, config: TieringConfig, batch: Any) -> int:
    own = {each.untyped_storage()._cdata for each in (*model.parameters(), *model.buffers())}
    # By address: a storage that is kept here keeps its address.
    saved: dict[int, UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage
        return tensor

    batch = tree_map(lambda each: _empty(each, each.dtype) if isinstance(each, Tensor) else each, batch)
    if config.cast_inputs:
        batch = cast_floating(batch, COMPUTE_DTYPES[config.precision])
    args, keywords = (), {}
    if isinstance(batch, Mapping):
        keywords = dict(batch)
    else:
        args = tuple(batch) if isinstance(batch, list | tuple) else (batch,)
    with (
        torch.enable_grad(),
        autocast(config, torch.device("cpu")),
        saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        # The graph lives until its storages are added up.
        output = model(*args, **keywords)
        nbytes = sum(storage.nbytes() for storage in saved.values())
    del output
    return nbytes


def _empty(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
