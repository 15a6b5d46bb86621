"""One run of a program: its engine, or the plain loop, and what the run has seen so far."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import tiering
from optim_cpu.formats import round_parameters
from tiering.errors import SwapError
from zero3.params.precision import COMPUTE_DTYPES, keeps_dtype
from zero3.params.row_tiles import tiled_weights

from .models import SEQUENCE, Model, ModelPlan
from .placements import Placement
from .plain import PlainLoop
from .training import Training


@dataclass(frozen=True)
class Number:
    """Something that a run has computed."""

    action: int
    label: str
    value: float


class Run:
    """What an action drives. ``placement`` None: the plain loop.

    ``seed`` makes the model's first values; ``directory`` holds swap files and checkpoints. ``roomy``: where it goes
    on, too, there is room for everything on the device.
    """

    def __init__(
        self,
        plan: ModelPlan,
        training: Training,
        placement: Placement | None,
        seed: int,
        directory: Path,
        *,
        roomy: bool = False,
    ) -> None:
        self.plan, self.training, self.placement = plan, training, placement
        self.seed, self.directory, self.roomy = seed, directory, roomy
        self.numbers: list[Number] = []
        self.action = 0
        self.handles: list[Any] = []  # hooks that actions have registered
        self.scheduler: Any = None
        self.exchanged: list[tuple[int, int]] = []  # blocks that have taken each other's place
        self.average: dict[str, Tensor] = {}  # moving averages of the weights
        self.kept: Tensor | None = None  # a loss whose graph is alive
        self.has_checkpoint = False
        self.snapshot: Path | None = None  # the last one, or the checkpoint in its place
        self.clean = True  # no gradients wait for a step
        self.by_hand = 0  # micro-batches of an update, where the script says which is the last one
        self.micro_batches = 0  # since the last update
        self.transfers_failed = False
        self.loop: Any = self._start()

    @property
    def on_tiers(self) -> bool:
        return self.placement is not None

    def _start(self) -> Any:
        if self.placement is None:
            model = self._build()
            self.training.cut(model)
            return self._adopt(PlainLoop(model, self.training))
        config = self.placement.config(self.training, self.directory)
        weights = self._save_weights() if self.placement.in_files else None
        if self.placement.has_budgets:
            engine = self._initialize(config, weights)
            engine.close()
            config["tiering"] |= self.placement.budgets(engine.plan)
        return self._adopt(self._initialize(config, weights))

    def _initialize(self, config: dict[str, Any], weights: Path | None) -> Any:
        model = self._build()
        if self.placement is not None and self.placement.cut_before:
            self.training.cut(model)
        given = self.training.given(model)
        return tiering.initialize(model=model, config=config, weights=weights, **given).engine

    def _save_weights(self) -> Path:
        """A file with the model's values, the frozen ones in the dtype of compute."""
        model, path = self._build(), self.directory / "weights.safetensors"
        tensors = {name: value.detach() for name, value in model.named_parameters()}
        for name, param in model.named_parameters():
            dtype = COMPUTE_DTYPES[self.training.precision]
            if not (param.requires_grad or keeps_dtype(param) or dtype is torch.float32):
                # As the engine rounds, which differs from torch where a value is between two others.
                tensors[name] = torch.empty(param.shape, dtype=dtype)
                round_parameters(param.detach().contiguous(), tensors[name])
        kept = {id(param) for param in model.parameters()}
        state = model.state_dict(keep_vars=True).items()
        tensors |= {name: value.detach() for name, value in state if id(value) not in kept}
        save_file({name: value.clone().contiguous() for name, value in tensors.items()}, path)
        return path

    def _build(self) -> Model:
        torch.manual_seed(self.seed)
        return Model(self.plan)

    def _adopt(self, loop: Any) -> Any:
        self.model: Model = loop.module
        self.to_train = {id(param) for param in self.model.parameters() if param.requires_grad}
        self.name_parameters()
        self.grouped: list[list[nn.Parameter]] = [[*group["params"]] for group in loop.optimizer.param_groups]
        return loop

    def name_parameters(self) -> None:
        """Take the names that parameters have now: they have others when blocks have changed places."""
        self.params = dict(self.model.named_parameters())
        self.trained = [name for name, param in self.params.items() if id(param) in self.to_train]

    def parts_of(self, name: str) -> tuple[str, ...]:
        """The names of the tiles of the weight ``name``; its own if it is whole."""
        weights = tiled_weights(self.model.named_modules(remove_duplicate=False))
        return next((tuple(weight.tiles) for weight in weights if weight.name == name), (name,))

    def exchange(self, first: int, other: int) -> None:
        """Put two blocks into each other's place."""
        blocks = self.model.blocks
        blocks[first], blocks[other] = blocks[other], blocks[first]
        self.name_parameters()

    def begin_anew(self, placement: Placement | None) -> None:
        """Close, and build model and engine again, perhaps elsewhere."""
        ways, training = self.model.ways, self.model.training
        self.forget_hooks()
        self._end()
        plain = self.loop if self.placement is None else None
        self.placement = placement
        self.scheduler, self.kept = None, None
        self.loop = self._start()
        if plain is not None:
            self.loop.take_over(plain)
        for places in self.exchanged:
            self.exchange(*places)
        self.model.ways = ways
        self.loop.train(training)
        self.by_hand = 0
        self.clean, self.micro_batches = True, 0

    def forget_hooks(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def record(self, label: str, value: Any) -> None:
        self.numbers.append(Number(self.action, label, float(value)))

    def record_sum(self, label: str, tensor: Tensor) -> None:
        """A number that depends on each element of ``tensor``."""
        flat = tensor.detach().double().flatten()
        self.record(label, (flat * torch.linspace(1, 2, flat.numel(), dtype=torch.float64)).sum())

    def batch(self, rng: random.Random) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        tokens = torch.randint(self.plan.vocabulary, (2, SEQUENCE + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    def loss(self, rng: random.Random, **options: Any) -> Tensor:
        loss: Tensor = self.loop(*self.batch(rng), **options)
        self.record("loss", loss)
        return loss

    def window(self, rng: random.Random, first: Callable[[], None] | None = None) -> None:
        """Micro-batches up to the next update, the first of them done by ``first``: forward, backward, but no step."""
        updated = False
        while not updated:
            if first is not None:
                first()
                first = None
            else:
                self.loop.backward(self.loss(rng))
            updated = self.end_micro_batch()

    def end_micro_batch(self) -> bool:
        """``step``; whether that was an update."""
        boundary: bool = self.loop.is_gradient_accumulation_boundary()
        if boundary and not self.training.may_step_in_backward:
            self.record("norm", self.loop.get_global_grad_norm())
        self.loop.step()
        self.end_step(boundary=boundary)
        return boundary

    def end_step(self, *, boundary: bool) -> None:
        """``step`` has ended a micro-batch, at a ``boundary`` with an update."""
        if boundary:
            self.record("norm of the update", self.loop.get_global_grad_norm() or 0.0)
        self.clean = boundary
        self.micro_batches = 0 if boundary else self.micro_batches + 1
        self.say_boundary()

    def say_boundary(self) -> None:
        """Tell the loop whether its next micro-batch is the last one, if the script does that."""
        if self.by_hand:
            self.loop.set_gradient_accumulation_boundary(self.micro_batches + 1 >= self.by_hand)

    def drop_gradients(self) -> None:
        """``zero_grad``: the engine's drops those of parameters in no param group, too."""
        (self.loop.optimizer if self.on_tiers else self.model).zero_grad()

    def gradients_are_gone(self) -> None:
        """An exception in backward has cost those since the last update."""
        self.clean, self.micro_batches = True, 0
        self.say_boundary()

    def finish_window(self, rng: random.Random) -> None:
        """Complete what a single micro-batch has begun."""
        if not self.clean:
            self.window(rng)

    @property
    def dtype(self) -> torch.dtype:
        """That in which the model computes."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.training.precision]

    def chosen(self, rng: random.Random, share: float = 0.5) -> list[str]:
        """Some names of parameters that are trained, one at least."""
        names = [name for name in self.trained if rng.random() < share]
        return names or [rng.choice(self.trained)]

    def close(self) -> None:
        self.forget_hooks()
        self.kept = None
        self._end()

    def _end(self) -> None:
        """Close the loop. It tells of a read ahead for a backward that another error had ended: nobody needs it."""
        try:
            self.loop.close()
        except SwapError as error:
            if not (self.transfers_failed and "read of 'activations'" in str(error)):
                raise
