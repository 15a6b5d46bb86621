"""N steps are k steps, a save, another engine that loads it, and N-k steps: bit for bit, whatever trains where."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tiering
from tests.zero3.conftest import config
from tests.zero3.resuming import (
    MIXED,
    ON_CPU,
    STREAMED,
    Left,
    Model,
    interrupted,
    moments,
    straight,
    tokens,
    train,
)
from zero3.engine.engine import Engine

STEPS, SAVE_AT = 6, 3
PLACEMENTS = {"memory": {}, "cpu": ON_CPU, "nvme": STREAMED, "mixed": MIXED}
FORMATS = ("fp32", "split", "bf16", "split+bf16")

Begin = Callable[..., Any]


@pytest.fixture
def begin(nvme: Path) -> Iterator[Begin]:
    """``begin(build, arguments_of, **config)`` makes an engine whenever it is called, by default in fp32.

    ``arguments_of(model)`` are the arguments of ``initialize`` beside the configuration.
    """
    engines: list[Engine] = []

    def beginning(
        build: Callable[[], nn.Module] = Model,
        arguments_of: Callable[[nn.Module], dict[str, Any]] = lambda model: {},
        **options: Any,
    ) -> Callable[[], Engine]:
        settings = config(nvme, **{"precision": "fp32", "accumulation": 1, "threshold": 40, **options})

        def make() -> Engine:
            model = build()
            engine = tiering.initialize(model=model, config=settings, **arguments_of(model)).engine
            engines.append(engine)
            return engine

        return make

    yield beginning
    for engine in engines:
        engine.close()


def check(begin: Callable[[], Any], directory: Path, **how: Any) -> Left:
    steps, save_at = how.pop("steps", STEPS), how.pop("save_at", SAVE_AT)
    reference = straight(begin, steps, how.get("train", train))
    resumed = interrupted(begin, steps, save_at, directory, **how)
    assert resumed.differences(reference) == []
    assert len(set(reference.losses)) == len(reference.losses), "the reference does not train"
    return reference


@pytest.mark.one_of(5)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_goes_on_as_if_it_had_not_stopped(
    begin: Begin, tmp_path: Path, precision: str, placement: str
) -> None:
    check(begin(precision=precision, **PLACEMENTS[placement]), tmp_path / "saved", meanwhile=2)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("state", FORMATS)
@pytest.mark.parametrize("placement", ["memory", "mixed"])
def test_every_format_of_state_goes_on(begin: Begin, tmp_path: Path, state: str, placement: str) -> None:
    check(begin(precision="bf16", state=state, **PLACEMENTS[placement]), tmp_path / "saved")


OPTIMIZERS = {
    "Adam": {"lr": 1e-3, "weight_decay": 0.1},
    "Lion": {"lr": 1e-4},
    "Adagrad": {"lr": 1e-2, "initial_accumulator_value": 0.1},
    "SGD": {"lr": 0.1},
    "SGD with momentum": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_goes_on(begin: Begin, tmp_path: Path, optimizer: str) -> None:
    rule = optimizer.split()[0]
    check(begin(rule=rule, optimizer=OPTIMIZERS[optimizer], precision="bf16", **MIXED), tmp_path / "saved")


CLIENTS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "RMSprop": lambda trained: torch.optim.RMSprop(trained, lr=1e-3, momentum=0.9),
    "Adam with amsgrad": lambda trained: torch.optim.Adam(trained, lr=1e-3, amsgrad=True),
    "Adam, its learning rate a tensor": lambda trained: torch.optim.Adam(trained, lr=torch.tensor(1e-3)),
    "NAdam": lambda trained: torch.optim.NAdam(trained),
    "SGD, taken over": lambda trained: torch.optim.SGD(trained, lr=0.1, momentum=0.9),
}


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


@pytest.mark.one_of(3)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("client", CLIENTS)
def test_an_optimizer_of_the_users_goes_on(begin: Begin, tmp_path: Path, client: str, precision: str) -> None:
    def arguments(model: nn.Module) -> dict[str, Any]:
        return {"optimizer": CLIENTS[client](trained(model))}

    check(begin(arguments_of=arguments, rule=None, precision=precision), tmp_path / "saved", meanwhile=1)


@pytest.mark.parametrize("save_at", [1, 2, 3, 4, 5])
def test_the_loss_scale_goes_on_around_skipped_steps(begin: Begin, tmp_path: Path, save_at: int) -> None:
    scale = {
        "initial_scale_power": 14,
        "loss_scale_window": 2,
        "hysteresis": 2,
        "consecutive_hysteresis": True,
    }
    outcome = check(
        begin(precision="fp16", fp16=scale, **STREAMED), tmp_path / "saved", save_at=save_at, steps=8
    )
    assert 0 < outcome.rest["steps"][1] < 8, "no step, or every step, was skipped"


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.01, total_steps=20),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(
        o, 1e-4, 1e-2, step_size_up=2, cycle_momentum=False
    ),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o, 0.1, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.8)],
        [2],
    ),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_schedule_of_torchs_goes_on(begin: Begin, tmp_path: Path, scheduler: str) -> None:
    check(begin(arguments_of=lambda _: {"lr_scheduler": SCHEDULERS[scheduler]}), tmp_path / "saved")


def test_param_groups_go_on_each_with_its_options_and_its_parameters_steps(
    begin: Begin, tmp_path: Path
) -> None:
    """A block is left out now and then: its bias correction is behind."""

    class Sometimes(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.table(tokens)
            for number, block in enumerate(self.blocks):
                if number != 1 or int(tokens[0]) % 2:
                    x = x + block(x)
            return nn.functional.cross_entropy(self.head(x).float(), tokens)

    def arguments(model: nn.Module) -> dict[str, Any]:
        decayed = [param for param in trained(model) if param.dim() > 1]
        rest = [param for param in trained(model) if param.dim() <= 1]
        return {
            "model_parameters": [
                {"params": decayed, "weight_decay": 0.3},
                {"params": rest, "lr": 5e-3, "weight_decay": 0.0, "name": "undecayed"},
            ]
        }

    outcome = check(
        begin(Sometimes, arguments, precision="bf16", **MIXED), tmp_path / "saved", steps=8, save_at=4
    )
    assert len(set(outcome.rest["steps of parameters"].values())) > 1
    assert outcome.rest["options"][1]["name"] == "undecayed"


@pytest.mark.parametrize("options", [{"accumulation": 3}, {"step_in_backward": True, "clip": 0.0}], ids=str)
def test_accumulation_and_steps_in_backward_go_on(
    begin: Begin, tmp_path: Path, options: dict[str, Any]
) -> None:
    check(begin(precision="bf16", **options, **STREAMED), tmp_path / "saved", steps=9, save_at=3)
    check(begin(precision="bf16", **options), tmp_path / "again", steps=9, save_at=6, meanwhile=3)


def test_recomputed_activations_go_on(begin: Begin, tmp_path: Path) -> None:
    """Recomputation puts random numbers back for dropout."""

    def build() -> nn.Module:
        model = Model()
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        return model

    check(begin(build, **STREAMED), tmp_path / "saved")


def test_a_model_built_without_memory_goes_on(begin: Begin, tmp_path: Path) -> None:
    def build() -> nn.Module:
        with tiering.zero.Init():
            return Model()

    check(begin(build, **STREAMED), tmp_path / "saved")


def test_a_loader_goes_on_in_the_middle_of_a_pass(begin: Begin, tmp_path: Path) -> None:
    data = [tokens(number)[:8] for number in range(14)]

    def train_on_it(engine: Any, steps: range) -> list[float]:
        losses: list[float] = []
        while len(losses) < len(steps):
            for batch in engine.training_dataloader:
                loss = engine(batch.flatten())
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
                if len(losses) == len(steps):
                    break
        return losses

    make = begin(arguments_of=lambda _: {"training_data": data})
    check(make, tmp_path / "saved", train=train_on_it, steps=10, save_at=3)
    check(make, tmp_path / "again", train=train_on_it, steps=10, save_at=9)


PLACES = [(state, place) for state in FORMATS for place in ("memory", "mixed")]


@pytest.mark.one_of(3)
@pytest.mark.parametrize("saved", PLACES, ids="-".join)
def test_whoever_loads_has_the_weights_to_the_bit_and_the_moments_but_for_rounding(
    begin: Begin, tmp_path: Path, saved: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    state, place = saved
    torch.manual_seed(1)
    engine = begin(precision="bf16", state=state, **PLACEMENTS[place])()
    train(engine, range(3))
    engine.save_checkpoint(tmp_path)
    masters, weights = engine.master_state_dict(), engine.state_dict()
    moments_before = moments(engine)
    caplog.set_level("INFO", "zero3.checkpoint.restore")
    for other_state, other_place in PLACES:
        caplog.clear()
        other = begin(precision="bf16", state=other_state, **PLACEMENTS[other_place])()
        other.load_checkpoint(tmp_path)
        here = f"{state} in {place}, loaded as {other_state} in {other_place}"
        there = other.master_state_dict()
        assert all(torch.equal(masters[name], there[name]) for name in masters), here
        there = other.state_dict()
        assert all(torch.equal(weights[name], there[name]) for name in weights), here
        rounded = "bf16" in other_state and "bf16" not in state
        messages = [line.message for line in caplog.records if "moments" in line.message]
        assert len(messages) == (("bf16" in other_state) != ("bf16" in state)), here
        assert not rounded or "rounds" in messages[0], here
        for name, moment in moments(other).items():
            if rounded:
                torch.testing.assert_close(moment, moments_before[name], rtol=2**-7, atol=0)
            else:
                assert torch.equal(moment, moments_before[name]), f"{name}, {here}"
        other.close()


def test_a_run_of_another_precision_and_accumulation_takes_the_state_and_begins_its_own_counts(
    begin: Begin, tmp_path: Path
) -> None:
    """A loss scale that was fixed says nothing about a dynamic one; an update begins with its first micro-batch."""
    engine = begin(precision="bf16", accumulation=4)()
    train(engine, range(12))
    engine.save_checkpoint(tmp_path)
    other = begin(precision="fp16", accumulation=5)()
    scale = other.loss_scale.value
    other.load_checkpoint(tmp_path)
    assert other.loss_scale.value == scale > 1
    assert other.global_steps == 3
    train(other, range(4))
    assert other.global_steps == 3
    train(other, range(4, 5))
    assert other.global_steps == 4
    other.save_checkpoint(tmp_path / "other")
    engine.load_checkpoint(tmp_path / "other")
    assert engine.loss_scale.value == 1
    train(engine, range(4))
    assert engine.global_steps == 5


def test_parameters_and_schedule_are_taken_without_the_optimizers_state(begin: Begin, tmp_path: Path) -> None:
    """A schedule that goes on from the rate in the param groups finds the one at which it was saved."""
    make = begin(arguments_of=lambda _: {"lr_scheduler": SCHEDULERS["CosineAnnealingWarmRestarts"]})
    engine = make()
    train(engine, range(3))
    engine.save_checkpoint(tmp_path)
    masters, rate = engine.master_state_dict(), engine.optimizer.param_groups[0]["lr"]
    other = make()
    first = other.optimizer.param_groups[0]["lr"]
    other.load_checkpoint(tmp_path, load_module_only=True)
    assert other.optimizer.param_groups[0]["lr"] == first != rate
    assert other.lr_scheduler.last_epoch == other.global_steps == 0
    other.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert other.optimizer.param_groups[0]["lr"] == rate
    assert other.lr_scheduler.last_epoch == 3
    assert all(torch.equal(masters[name], master) for name, master in other.master_state_dict().items())
    assert not any(moment.any() for moment in moments(other).values())
