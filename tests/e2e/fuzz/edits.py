"""Actions that change the model, its weights, its gradients or the optimizer's options by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import Tensor, nn

import tiering

from .run import Run
from .table import Effect, Needs, action


@action(Effect.WEIGHTS, weight=2, frozen=True)
def edit(run: Run, rng: random.Random) -> None:
    """Change parts of some weights in place."""
    params = [param for param in run.params.values() if rng.random() < 0.4] or [*run.model.output_weights]
    through_data = rng.random() < 0.3
    with tiering.gathered(params, modify=True), torch.no_grad():
        for param in params:
            part = tuple(slice(0, max(1, size // 2)) for size in param.shape)
            values = (param.data if through_data else param)[part]
            values.mul_(0.75) if values.is_floating_point() else values.add_(3)


@action(Effect.WEIGHTS, frozen=True)
def load_weights(run: Run, rng: random.Random) -> None:
    """Load a state dict into the model."""
    scale = rng.choice((0.9, 1.1))
    loaded = {name: scaled(value, scale) for name, value in run.loop.state_dict().items()}
    with tiering.gathered(run.model, modify=True):
        run.model.load_state_dict(loaded)


def scaled(value: Tensor, scale: float) -> Tensor:
    return value * scale if value.is_floating_point() else value.clone()


@action(Effect.WEIGHTS, in_place=True, frozen=True)
def clamp_in_forward(run: Run, rng: random.Random) -> None:
    """Forwards that limit weights in place."""
    run.model.ways = replace(run.model.ways, clamped=True)
    run.window(rng)
    run.model.ways = replace(run.model.ways, clamped=False)


@action(Effect.WEIGHTS)
def freeze(run: Run, rng: random.Random) -> None:
    """Freeze some of what is trained."""
    for name in run.chosen(rng, 0.3):
        if all(run.params[name] is not weight for weight in run.model.output_weights):
            run.params[name].requires_grad_(False)
    run.window(rng)


@action(Effect.WEIGHTS)
def freeze_one_update(run: Run, rng: random.Random) -> None:
    """Freeze some of what is trained for one update, and unfreeze everything."""
    freeze(run, rng)
    for name in run.trained:
        run.params[name].requires_grad_(True)


@action(Effect.WEIGHTS)
def options(run: Run, rng: random.Random) -> None:
    """Change the options of param groups."""
    for group in run.loop.optimizer.param_groups:
        group["lr"] = group["lr"] * rng.choice((0.5, 2.0))
        group["weight_decay"] = rng.choice((0.0, 0.02))
        if "betas" in group:
            group["betas"] = rng.choice(((0.9, 0.999), (0.8, 0.95)))


@action(Effect.WEIGHTS)
def schedule(run: Run, rng: random.Random) -> None:
    """An update, and a step of a scheduler that the script has made."""
    if run.scheduler is None:
        run.scheduler = torch.optim.lr_scheduler.LambdaLR(
            run.loop.optimizer, lambda step: 1 / (1 + 0.3 * step)
        )
    run.window(rng)
    run.scheduler.step()


@action(Effect.WEIGHTS)
def remove_from_groups(run: Run, rng: random.Random) -> None:
    """Take weights out of their param groups: they are trained no more."""
    for group in run.loop.optimizer.param_groups:
        group["params"] = [param for param in _by_name(run, group["params"]) if rng.random() < 0.7]
    run.window(rng)


@action(Effect.WEIGHTS)
def remove_for_one_update(run: Run, rng: random.Random) -> None:
    """The same for one update, and put them back."""
    remove_from_groups(run, rng)
    put_back(run)


@action(Effect.WEIGHTS)
def move_between_groups(run: Run, rng: random.Random) -> None:
    """Move a weight to another param group, whose options count from then on."""
    groups = run.loop.optimizer.param_groups
    groups[-1]["lr"] = 0.5 * groups[-1]["lr"]
    movable = _by_name(run, groups[0]["params"]) if len(groups) > 1 else []
    for param in movable[: rng.randint(1, 3)]:
        groups[0]["params"] = [other for other in groups[0]["params"] if other is not param]
        groups[-1]["params"] = [*groups[-1]["params"], param]
    run.window(rng)


def _by_name(run: Run, params: list[nn.Parameter]) -> list[nn.Parameter]:
    """``params`` in an order that does not depend on whether tiles or their optimizer were made first."""
    names = {id(param): name for name, param in run.params.items()}
    return sorted(params, key=lambda param: names[id(param)])


def put_back(run: Run) -> None:
    """Param groups have the weights again that they began with."""
    for group, params in zip(run.loop.optimizer.param_groups, run.grouped, strict=True):
        group["params"] = [*params]


@action(Effect.WEIGHTS)
def skip_block(run: Run, rng: random.Random) -> None:
    """Leave out a block from now on: its weights get no gradient."""
    run.model.ways = replace(run.model.ways, skipped=frozenset({rng.randrange(len(run.model.blocks))}))
    run.window(rng)


@action(Effect.WEIGHTS)
def skip_one_update(run: Run, rng: random.Random) -> None:
    """Leave out a block for one update."""
    skip_block(run, rng)
    run.model.ways = replace(run.model.ways, skipped=frozenset())


@action(Effect.WEIGHTS)
def reorder(run: Run, rng: random.Random) -> None:
    """Call the blocks in another order, some of them twice."""
    count = len(run.model.blocks)
    order = [*range(count), rng.randrange(count)]
    rng.shuffle(order)
    run.model.ways = replace(run.model.ways, order=tuple(order))
    run.window(rng)


@action(Effect.WEIGHTS, plain=False)
def exchange_blocks(run: Run, rng: random.Random) -> None:
    """Put two blocks into each other's place in the model."""
    count = len(run.model.blocks)
    places = rng.randrange(count), rng.randrange(count)
    run.exchange(*places)
    run.exchanged.append(places)
    run.window(rng)


@action(Effect.WEIGHTS, Needs.STEP_APART)
def drop_gradients(run: Run, rng: random.Random) -> None:
    """Drop the gradients of a backward before they are used."""

    def first() -> None:
        run.loop.backward(run.loss(rng))
        run.drop_gradients()
        run.loop.backward(run.loss(rng))

    run.window(rng, first)


@action(Effect.NUMBERS, clean=False)
def drop_no_gradients(run: Run, rng: random.Random) -> None:
    """zero_grad where there may be nothing to drop, as loops do before each forward."""
    if run.clean:
        run.drop_gradients()
    run.record("clean", run.clean)


@action(Effect.WEIGHTS, Needs.STEP_APART)
def assign_gradients(run: Run, rng: random.Random) -> None:
    """Set ``.grad`` of some parameters between backward and step."""

    def first() -> None:
        run.loop.backward(run.loss(rng))
        for name in run.chosen(rng, 0.3):
            param = run.params[name]
            param.grad = torch.full_like(param, 0.01 if rng.random() < 0.7 else 0.0)

    run.window(rng, first)


@action(Effect.WEIGHTS, Needs.STEP_APART)
def assign_gradients_of_own(run: Run, rng: random.Random) -> None:
    """Set ``.grad`` to what was computed from the gradients by name."""

    def first() -> None:
        run.loop.backward(run.loss(rng))
        for name in run.chosen(rng, 0.3):
            gradient = run.loop.get_fp32_gradient(name)
            if gradient is not None:
                run.params[name].grad = (0.5 * gradient).to(run.dtype)

    run.window(rng, first)


@action(Effect.WEIGHTS, Needs.STEP_APART)
def set_gradients(run: Run, rng: random.Random) -> None:
    """Set gradients by name, to what they were times a factor."""

    def first() -> None:
        run.loop.backward(run.loss(rng))
        for name in run.chosen(rng, 0.3):
            gradient = run.loop.get_fp32_gradient(name)
            if gradient is not None:
                run.record_sum(f"gradient of {name}", gradient)
                run.loop.set_fp32_gradient(name, 1.5 * gradient)

    run.window(rng, first)


@action(Effect.WEIGHTS)
def set_parameters(run: Run, rng: random.Random) -> None:
    """Set masters by name."""
    for name in run.chosen(rng, 0.3):
        run.loop.set_fp32_parameter(name, 1.01 * run.loop.get_fp32_parameter(name))


@action(Effect.WEIGHTS)
def set_states(run: Run, rng: random.Random) -> None:
    """Set the optimizer's state by name."""
    for name in run.chosen(rng, 0.3):
        for key in run.loop.state_names:
            value = run.loop.get_fp32_state(name, key)
            run.record_sum(f"{key} of {name}", value)
            run.loop.set_fp32_state(name, key, 0.5 * value)


@action(Effect.NUMBERS, frozen=True)
def averaged_evaluation(run: Run, rng: random.Random) -> None:
    """Follow the weights by an average, and evaluate with it in their place for a while."""
    current = {name: value.clone() for name, value in run.loop.state_dict().items()}
    for name, value in current.items():
        average = run.average.get(name)
        if average is None or average.shape != value.shape or not value.is_floating_point():
            run.average[name] = scaled(value, 0.99)
        else:
            average.lerp_(value, 0.25)
    for weights in (run.average, current):
        with tiering.gathered(run.model, modify=True):
            run.model.load_state_dict({name: weights[name] for name in current})
        run.loop.eval()
        with torch.no_grad():
            run.loss(rng)
        run.loop.train()
