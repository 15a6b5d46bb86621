"""Actions that read: state by name, copies of the model, hooks."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import tiering
from zero3.params.row_tiles import tiled_weights

from .edits import scaled
from .run import Run
from .table import Effect, Needs, action


@action(Effect.NUMBERS, clean=False)
def read_weights(run: Run, rng: random.Random) -> None:
    """The weights, by the engine or by the module."""
    source = run.loop if rng.random() < 0.5 else run.model
    for name, value in sorted(source.state_dict().items()):
        run.record_sum(name, value)


@action(Effect.NUMBERS)
def read_masters(run: Run, rng: random.Random) -> None:
    """Masters and optimizer state, by name."""
    for name, value in sorted(run.loop.master_state_dict().items()):
        run.record_sum(name, value)
    name = rng.choice(run.trained)
    run.record_sum(name, run.loop.get_fp32_parameter(name))
    for key in run.loop.state_names:
        run.record_sum(f"{key} of {name}", run.loop.get_fp32_state(name, key))


@action(Effect.NUMBERS, clean=False)
def read_gathered(run: Run, rng: random.Random) -> None:
    """Weights inside gathered(), where blocks can be called, too."""
    with tiering.gathered(run.model), torch.no_grad():
        for name, param in run.model.named_parameters():
            run.record_sum(name, param)
        if rng.random() < 0.5:
            run.loss(rng)


@action(Effect.WEIGHTS)
def penalty_gathered(run: Run, rng: random.Random) -> None:
    """A loss with a term of weights that were gathered."""

    def first() -> None:
        names = run.chosen(rng, 0.3)
        with tiering.gathered([run.params[name] for name in names]) as params:
            penalty = sum(param.float().square().sum() for param in params)
        run.loop.backward(run.loss(rng) + 0.01 * penalty)

    run.window(rng, first)


@action(Effect.NUMBERS, clean=False)
def ask_for_metadata(run: Run, rng: random.Random) -> None:
    """What needs no values: shapes, and tensors like a parameter."""
    for param in run.params.values():
        zeros = torch.zeros_like(param)
        run.record("elements", zeros.numel() + param.numel() + param.dim() + param.stride(-1))


@action(Effect.NUMBERS, Needs.STEP_APART)
def ask_for_gradients(run: Run, rng: random.Random) -> None:
    """``.grad`` and gradients by name, between backward and step; nothing is updated."""
    run.loop.backward(run.loss(rng))
    for name in run.chosen(rng):
        gradient = run.loop.get_fp32_gradient(name)
        if gradient is not None:
            run.record_sum(f"gradient of {name}", gradient)
        if run.on_tiers:
            run.record("has .grad", run.params[name].grad is not None)
    run.record("norm", run.loop.get_global_grad_norm() or 0.0)
    run.drop_gradients()
    run.end_micro_batch()


@action(Effect.NUMBERS)
def copy_model(run: Run, rng: random.Random) -> None:
    """A copy of the model, or a pickled one, is an ordinary model: train it for a step."""
    run.model.forget_balances()
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in run.model.modules())
    copied = pickled(run.model) if run.plan.encoder_layers == 0 and not run.handles and not hooked else None
    twin = copied if copied is not None and rng.random() < 0.5 else copy.deepcopy(run.model)
    twin.eval()
    loss = twin(*run.batch(rng))
    run.record("loss of the copy", loss)
    params = [param for param in twin.parameters() if param.requires_grad]
    for gradient in torch.autograd.grad(loss, params, allow_unused=True) if not run.plan.reentrant else ():
        if gradient is not None:
            run.record_sum("gradient of the copy", gradient)


def pickled(model: nn.Module) -> nn.Module:
    restored: nn.Module = pickle.loads(pickle.dumps(model))
    return restored


@action(Effect.NUMBERS, Needs.NO_SHARED_BLOCK)
def call_with_copies(run: Run, rng: random.Random) -> None:
    """The model as a function of copies of its weights: torch leaves some of them in modules that have two names."""
    copies = _copies(run)
    tracked = [value.requires_grad_() for value in copies.values() if value.is_floating_point()]
    run.loop.eval()
    loss = functional_call(run.model, copies, run.batch(rng))
    run.loop.train()
    run.record("loss", loss)
    # What backward computes again uses the weights of the modules then.
    if not run.plan.reentrant and not run.plan.loss_rows:
        for gradient in torch.autograd.grad(loss, tracked, allow_unused=True):
            if gradient is not None:
                run.record_sum("gradient of a copy", gradient)


def _copies(run: Run) -> dict[str, Tensor]:
    state = run.loop.state_dict()
    for weight in tiled_weights(run.model.named_modules()):
        tiles = weight.tiles
        parts = state.pop(weight.name).split([len(tile) for tile in tiles.values()])
        state |= zip(tiles, parts, strict=True)
    names = {name for name, _ in run.model.named_parameters()}
    return {name: scaled(value, 0.9) for name, value in state.items() if name in names}


@action(Effect.WEIGHTS)
def hook_gradients(run: Run, rng: random.Random) -> None:
    """Hooks on parameters, which change gradients from now on."""
    for name in run.chosen(rng, 0.3):
        if run.params[name].requires_grad:
            run.handles.append(run.params[name].register_hook(lambda gradient: 0.5 * gradient))
    run.window(rng)


@action(Effect.WEIGHTS)
def hook_outputs(run: Run, rng: random.Random) -> None:
    """A forward hook on a block, which changes its output from now on."""

    def scale(module: nn.Module, args: Any, output: Any) -> Any:
        return (1.1 * output[0], output[1]) if isinstance(output, tuple) else 1.1 * output

    run.handles.append(rng.choice([*run.model.blocks]).register_forward_hook(scale))
    run.window(rng)


@action(Effect.WEIGHTS)
def hook_inputs(run: Run, rng: random.Random) -> None:
    """A hook before a block's forward, which reads the block's weight, for one update."""

    def scale(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        weight = next(module.parameters()).detach().float().mean()
        return ((1 + weight).to(args[0].dtype) * args[0],)

    handle = rng.choice([*run.model.blocks]).register_forward_pre_hook(scale)
    run.window(rng)
    handle.remove()


@action(Effect.UPDATE)
def hook_backward(run: Run, rng: random.Random) -> None:
    """A backward hook on a block that looks at its weight, for one update."""
    sums: list[Tensor] = []

    def look(module: nn.Module, inputs: Any, outputs: Any) -> None:
        sums.append(next(module.parameters()).detach().double().sum())

    block = random.Random(run.action).choice([*run.model.blocks])  # the batch is that of an update
    handle = block.register_full_backward_hook(look)
    run.window(rng)
    handle.remove()
    for value in sums:
        run.record("weight in the hook", value)


@action(Effect.WEIGHTS)
def remove_hooks(run: Run, rng: random.Random) -> None:
    """Remove the hooks that are there."""
    if not run.handles:
        hook_outputs(run, rng)
    run.forget_hooks()
