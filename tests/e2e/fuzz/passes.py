"""Actions that run forwards, backwards and steps."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import set_checkpoint_early_stop

from .models import PlannedError
from .run import Run
from .table import Effect, Needs, action


@action(Effect.UPDATE, weight=6)
def update(run: Run, rng: random.Random) -> None:
    """All micro-batches of an update."""
    run.window(rng)


@action(Effect.UPDATE, weight=2, clean=False)
def micro_batch(run: Run, rng: random.Random) -> None:
    """One micro-batch, which may be the last before an update."""
    run.loop.backward(run.loss(rng))
    run.end_micro_batch()


@action(Effect.UPDATE)
def own_backward(run: Run, rng: random.Random) -> None:
    """The loss's own backward, in the scale of the engine."""
    run.window(rng, lambda: run.loop.scale(run.loss(rng)).backward())


@action(Effect.NUMBERS, clean=False)
def evaluate(run: Run, rng: random.Random) -> None:
    """A forward in evaluation mode, without gradients."""
    run.loop.eval()
    with torch.no_grad():
        run.loss(rng)
    run.loop.train()


@action(Effect.NUMBERS, clean=False)
def infer(run: Run, rng: random.Random) -> None:
    """A forward in inference mode, the model in training mode or not."""
    run.loop.train(rng.random() < 0.5)
    with torch.inference_mode():
        run.loss(rng)
    run.loop.train()


@action(Effect.NUMBERS)
def generate(run: Run, rng: random.Random) -> None:
    """Sample a few tokens, each by a forward over those before it."""
    tokens = run.batch(rng)[0]
    run.loop.eval()
    with torch.no_grad():
        for _ in range(3):
            logits = run.loop(tokens)[:, -1]
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], dim=1)
    run.loop.train()
    run.record_sum("tokens", tokens)


@action(Effect.NUMBERS, clean=False)
def forward_alone(run: Run, rng: random.Random) -> None:
    """A forward whose loss is kept for a while, and never sent backward."""
    run.kept = run.loss(rng)


@action(Effect.UPDATE)
def evaluate_before_backward(run: Run, rng: random.Random) -> None:
    """An evaluation between a forward and its backward."""

    def first() -> None:
        loss = run.loss(rng)
        evaluate(run, rng)
        run.loop.backward(loss)

    run.window(rng, first)


@action(Effect.NUMBERS, clean=False)
def forward_error(run: Run, rng: random.Random) -> None:
    """An exception in a block's forward."""
    _fail(run, rng, "forward", lambda: run.loss(rng))


@action(Effect.NUMBERS, Needs.STEP_APART)
def backward_error(run: Run, rng: random.Random) -> None:
    """An exception in a block's backward, or in its recomputation: gradients since the last update are gone."""

    def first() -> None:
        run.loop.backward(run.loss(rng))
        run.drop_gradients()

    failed = _fail(run, rng, rng.choice(("backward", "recomputation")), first)
    if failed:
        run.gradients_are_gone()
    else:
        run.end_micro_batch()


@action(Effect.NUMBERS, Needs.STEP_APART, plain=False)
def own_backward_error(run: Run, rng: random.Random) -> None:
    """The same in the loss's own backward; a forward follows."""
    if _fail(run, rng, "backward", lambda: run.loop.scale(run.loss(rng)).backward()):
        run.gradients_are_gone()
    else:
        run.drop_gradients()
        run.end_micro_batch()
    evaluate(run, rng)


def _fail(run: Run, rng: random.Random, where: str, call: Callable[[], Any]) -> bool:
    block = rng.choice([*run.model.blocks])
    block.failing = where
    try:
        call()
    except PlannedError:
        run.record(f"failed in {where}", 1)
        return True
    finally:
        block.failing = ""
    run.record(f"failed in {where}", 0)
    return False


@action(Effect.WEIGHTS, Needs.STEP_APART)
def retain_graph(run: Run, rng: random.Random) -> None:
    """A graph that is kept for a second backward."""

    def first() -> None:
        loss = run.loss(rng)
        run.loop.backward(loss, retain_graph=True)
        run.loop.backward(0.5 * loss)

    run.window(rng, first)


@action(Effect.WEIGHTS, Needs.STEP_APART)
def two_forwards(run: Run, rng: random.Random) -> None:
    """Two forwards before their backwards, in either order or as a sum."""

    def first() -> None:
        losses = [run.loss(rng), run.loss(rng)]
        order = rng.choice(("as they came", "reversed", "sum"))
        if order == "sum":
            losses = [losses[0] + losses[1]]
        for loss in losses if order == "as they came" else reversed(losses):
            run.loop.backward(loss)

    run.window(rng, first)


@action(Effect.NUMBERS, Needs.STEP_APART)
def not_finite(run: Run, rng: random.Random) -> None:
    """A step that is skipped, for its gradients are not finite."""
    run.window(rng, lambda: run.loop.backward(run.loss(rng) * float(rng.choice(("nan", "inf")))))


@action(Effect.WEIGHTS, Needs.STEP_APART | Needs.FP16)
def change_loss_scale(run: Run, rng: random.Random) -> None:
    """Set the loss scale between backward and step: the update takes it for that of the gradients."""

    def first() -> None:
        run.loop.backward(run.loss(rng))
        run.loop.loss_scale.value *= rng.choice((0.5, 2.0))

    run.window(rng, first)


@action(Effect.WEIGHTS, Needs.STEP_APART, plain=False)
def large_loss(run: Run, rng: random.Random) -> None:
    """A loss whose gradients are clipped, if any are, and which are too large for fp16."""
    run.window(rng, lambda: run.loop.backward(run.loss(rng) * rng.choice((1e2, 1e4, 1e6))))


@action(Effect.NUMBERS, Needs.NO_REENTRANT_CHECKPOINT)
def gradients_of_parameters(run: Run, rng: random.Random) -> None:
    """torch.autograd.grad with respect to parameters."""
    names = [name for name in run.trained if run.params[name].requires_grad]
    gradients = torch.autograd.grad(run.loss(rng), [run.params[name] for name in names], allow_unused=True)
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is not None:
            run.record_sum(f"gradient of {name}", gradient)


@action(Effect.NUMBERS, Needs.NO_REENTRANT_CHECKPOINT)
def gradient_of_input(run: Run, rng: random.Random) -> None:
    """torch.autograd.grad with respect to an input."""
    offset = torch.zeros(run.plan.width, requires_grad=True)
    (gradient,) = torch.autograd.grad(run.loss(rng, offset=offset), offset)
    run.record_sum("gradient of the offset", gradient)


@action(Effect.WEIGHTS, Needs.STEP_APART | Needs.NO_REENTRANT_CHECKPOINT)
def perturbed(run: Run, rng: random.Random) -> None:
    """Train on inputs that were moved along their gradient."""

    def first() -> None:
        offset = torch.zeros(run.plan.width, requires_grad=True)
        (gradient,) = torch.autograd.grad(run.loss(rng, offset=offset), offset)
        run.loop.backward(run.loss(rng, offset=0.1 * gradient.sign()))

    run.window(rng, first)


@action(Effect.WEIGHTS, Needs.NO_REENTRANT_CHECKPOINT)
def backward_of_some(run: Run, rng: random.Random) -> None:
    """A backward that is asked for the gradients of some parameters."""

    def first() -> None:
        parameters = [run.params[name] for name in run.chosen(rng) if run.params[name].requires_grad]
        loss = run.loop.scale(run.loss(rng))
        loss.backward(inputs=[*parameters, *run.model.output_weights])

    run.window(rng, first)


@action(Effect.WEIGHTS, Needs.ONE_MICRO_BATCH)
def no_sync(run: Run, rng: random.Random) -> None:
    """Accumulation by the script, which leaves the last backward outside of no_sync."""
    if run.by_hand:
        return run.window(rng)
    with run.loop.no_sync():
        run.loop.backward(run.loss(rng))
    run.window(rng)
    return None


@action(Effect.WEIGHTS)
def own_boundary(run: Run, rng: random.Random) -> None:
    """From now on the script says which micro-batch is the last one of an update."""
    run.by_hand = rng.choice((1, 2, 3))
    run.say_boundary()
    run.window(rng)


@action(Effect.NUMBERS, clean=False)
def block_alone(run: Run, rng: random.Random) -> None:
    """A block that is called by itself."""
    x = _stream(run, rng)
    run.loop.eval()
    with torch.no_grad():
        run.record_sum("block", _first(rng.choice([*run.model.blocks])(x)))
    run.loop.train()


@action(Effect.WEIGHTS)
def block_in_loss(run: Run, rng: random.Random) -> None:
    """A loss with a term of a block that was called by itself."""

    def first() -> None:
        loss = run.loss(rng)
        extra = _first(rng.choice([*run.model.blocks])(_stream(run, rng)))
        run.loop.backward(loss + 0.1 * extra.float().square().mean())

    run.window(rng, first)


@action(Effect.WEIGHTS)
def distilled(run: Run, rng: random.Random) -> None:
    """A loss against the logits that the model gave in evaluation mode."""

    def first() -> None:
        tokens, _ = run.batch(rng)
        run.loop.eval()
        with torch.no_grad():
            teacher = run.loop(tokens)
        run.loop.train()
        loss = functional.mse_loss(run.loop(tokens), 0.5 * teacher)
        run.record("loss", loss)
        run.loop.backward(loss)

    run.window(rng, first)


def _stream(run: Run, rng: random.Random) -> Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    return torch.randn(2, 3, run.plan.width, generator=generator).to(run.dtype)


def _first(output: Any) -> Tensor:
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first


@action(Effect.UPDATE)
def in_thread(run: Run, rng: random.Random) -> None:
    """An update in a thread of its own."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            run.window(rng)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@action(Effect.UPDATE)
def activations_on_cpu(run: Run, rng: random.Random) -> None:
    """An update under torch's hooks for saved tensors."""
    with torch.autograd.graph.save_on_cpu():
        run.window(rng)


@action(Effect.UPDATE)
def whole_recomputations(run: Run, rng: random.Random) -> None:
    """An update whose checkpoints recompute to the end."""
    with set_checkpoint_early_stop(False):
        run.window(rng)


@action(Effect.WEIGHTS, Needs.FP32, plain=False)
def autocast(run: Run, rng: random.Random) -> None:
    """A forward under autocast."""

    def first() -> None:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = run.loss(rng)
        run.loop.backward(loss)

    run.window(rng, first)
