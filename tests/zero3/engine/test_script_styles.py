"""Scripts of other kinds than the tutorial's: teachers, and loops that keep old habits."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DistributedSampler

import tiering as deepspeed
from tests.zero3.conftest import batches
from tiering.errors import ConfigError, EngineStateError
from tiering.runtime.zero.partition_parameters import ZeroParamStatus


@pytest.mark.parametrize("home", ["none", "cpu", "nvme"])
def test_an_engine_without_an_optimizer_answers_and_does_not_train(
    start: Callable[..., Any],
    small_model: type[nn.Module],
    micro_batches: Callable[..., Any],
    tmp_path: Path,
    home: str,
) -> None:
    """A teacher, or the reference of RLHF: no state, no gradients, and the weights of a run that trained."""
    batches = [*micro_batches(3)]
    trained = start(precision="fp32", accumulation=1, offload_param=home)
    trained.backward(trained(*batches[0]))
    trained.step()
    trained.save_checkpoint(tmp_path)
    with torch.no_grad():
        expected = [trained(*batch) for batch in batches]

    torch.manual_seed(4)
    model = small_model()
    plain = copy.deepcopy(model)
    # No parameters are none to train, as Lightning has it.
    teacher = start(model, precision="fp32", rule=None, offload_param=home, model_parameters=[])
    assert torch.equal(teacher.eval()(*batches[0]), plain(*batches[0]))
    assert not any(param.requires_grad for param in teacher.parameters())
    path, _ = teacher.load_checkpoint(tmp_path)
    assert path is not None
    assert all(torch.equal(teacher(*batch), loss) for batch, loss in zip(batches, expected, strict=True))
    assert teacher.plan.workload.state_tensors == 0 and teacher.get_lr() == [0.0]
    for call in (lambda: teacher.backward(torch.zeros((), requires_grad=True)), teacher.step):
        with pytest.raises(EngineStateError, match="without an optimizer"):
            call()


def test_a_teacher_lets_gradients_through() -> None:
    torch.manual_seed(4)
    critic = nn.Sequential(nn.Linear(6, 600), nn.ReLU(), nn.Linear(600, 1))
    plain = copy.deepcopy(critic)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    engine = deepspeed.initialize(
        model=critic, config=config | {"tiering": {"telemetry": {"enabled": False}}}
    )[0]
    inputs, same = (torch.ones(2, 6, requires_grad=True) for _ in range(2))
    engine(inputs).sum().backward()
    plain(same).sum().backward()
    assert inputs.grad is not None and same.grad is not None and torch.equal(inputs.grad, same.grad)
    engine.close()


def test_parameters_without_an_optimizer_are_a_mistake(
    start: Callable[..., Any], small_model: type[nn.Module]
) -> None:
    model = small_model()
    message = r"name one in the configuration's optimizer section .* or pass a torch opt"
    with pytest.raises(ConfigError, match=message):
        start(model, model_parameters=model.parameters(), rule=None)
    assert all(param.requires_grad and bool(param.isfinite().all()) for param in model.parameters())


def gan(
    critic: Any, generator: Any, backwards: tuple[Any, Any], steps: tuple[Any, Any], seed: int = 2
) -> list[float]:
    """Losses of both. The critic gets gradients that it does not want in the generator's backward."""
    torch.manual_seed(seed)
    losses = []
    for _ in range(3):
        critic.zero_grad()
        real, fake = torch.randn(4, 8), generator(torch.randn(4, 4))
        loss = functional.softplus(-critic(real)).mean() + functional.softplus(critic(fake.detach())).mean()
        backwards[0](loss)
        steps[0]()
        generator.zero_grad()
        fooled = functional.softplus(-critic(fake)).mean()
        backwards[1](fooled)
        steps[1]()
        losses += [loss.item(), fooled.item()]
    return losses


def perceptrons() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    sizes = (8, 1), (4, 8)
    critic, generator = (nn.Sequential(nn.Linear(i, 16), nn.ReLU(), nn.Linear(16, o)) for i, o in sizes)
    return critic, generator


@torch.no_grad()
def sgd(model: nn.Module) -> None:
    """torch.optim's, which loads a compiler at its first step, for two seconds."""
    for param in model.parameters():
        param -= 0.5 * param.grad


def engine_of(model: nn.Module, stage: int, **settings: Any) -> Any:
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": stage},
        "tiering": {"telemetry": {"enabled": False}},
        **settings,
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_gan_of_two_engines_is_that_of_torch(stage: int) -> None:
    """The critic's zero_grad drops what the generator's loss has left in it, at every stage."""
    models = perceptrons()
    expected = gan(
        *models, (Tensor.backward, Tensor.backward), (partial(sgd, models[0]), partial(sgd, models[1]))
    )
    critic, generator = (engine_of(model, stage) for model in perceptrons())
    with critic, generator:
        losses = gan(critic, generator, (critic.backward, generator.backward), (critic.step, generator.step))
    assert losses == expected


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_bad_batch_is_skipped_by_zero_grad(stage: int) -> None:
    """As if it had not been, at every stage; ``step`` without another one is a mistake."""
    states = []
    for skips in (True, False):
        with engine_of(perceptrons()[0], stage) as engine:
            if skips:
                engine.backward(engine(torch.full((4, 8), 100.0)).square().mean())
                engine.zero_grad()
                with pytest.raises(EngineStateError, match="without a backward since the last one"):
                    engine.step()
            engine.backward(engine(torch.ones(4, 8)).square().mean())
            engine.step()
            assert (engine.global_steps, engine.micro_steps) == (1, 1)
            states.append(engine.master_state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_zero_grad_comes_too_late_for_a_backward_that_steps() -> None:
    tiering = {"step_in_backward": True, "telemetry": {"enabled": False}}
    with engine_of(perceptrons()[0], 3, tiering=tiering) as engine:
        engine.backward(engine(torch.ones(4, 8)).mean())
        engine.zero_grad()
        engine.step()
        assert engine.was_step_applied()


@pytest.mark.parametrize("caller", ["engine", "optimizer"])
def test_zero_grad_while_micro_batches_wait(caller: str, caplog: pytest.LogCaptureFixture) -> None:
    """An engine's leaves them, an optimizer's drops them; both say so once."""
    model = perceptrons()[0]
    before = copy.deepcopy(model)
    with engine_of(model, 0, gradient_accumulation_steps=3) as engine:
        for data in torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(3)):
            (engine if caller == "engine" else engine.optimizer).zero_grad()
            engine.backward(engine(data).square().mean())
            engine.step()
            if caller == "optimizer":
                before.zero_grad()
            (before(data).square().mean() / 3).backward()
        sgd(before)
        assert engine.was_step_applied()
        state = engine.master_state_dict()
    for name, param in before.named_parameters():
        torch.testing.assert_close(state[name], param.detach())
    assert caplog.text.count("zero_grad() drops the gradients of 1 micro-batches") == (caller == "optimizer")
    assert caplog.text.count("engine.zero_grad() keeps the gradients") == (caller == "engine")


def test_what_a_wrapper_asks_the_optimizer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    with engine_of(perceptrons()[0], 2, fp16=fp16) as engine:
        optimizer = engine.optimizer
        assert (optimizer.overflow, optimizer.cur_scale, optimizer.dynamic_loss_scale) == (False, 16.0, True)
        for factor, overflow, scale in ((float("inf"), True, 8.0), (1.0, False, 8.0)):
            engine.backward(engine(torch.ones(4, 8).half()).mean() * factor)
            engine.step()
            assert (optimizer.overflow, optimizer.loss_scale) == (overflow, scale)


def test_an_engine_that_is_moved_stays_an_engine() -> None:
    with engine_of(perceptrons()[0], 3) as engine:
        assert engine.to(engine.device) is engine and engine.float().cpu().requires_grad_(True) is engine
        assert engine.apply(lambda module: None) is engine
        engine.backward(engine(torch.ones(4, 8)).mean())
        engine.step()
        engine.half()
        with pytest.raises(
            EngineStateError, match=r"was assigned other memory.*dtype or device before initialize"
        ):
            engine(torch.ones(4, 8))


def maybe_zero_3(param: Any) -> Tensor:
    """As scripts have it that save adapters themselves, with their imports exchanged."""
    if hasattr(param, "ds_id"):
        assert param.ds_status == ZeroParamStatus.NOT_AVAILABLE
        assert (param.ds_shape, param.ds_numel) == (param.shape, param.numel())
        with deepspeed.zero.GatheredParameters([param]):
            return param.data.detach().cpu().clone()
    return param.detach().cpu().clone()


@pytest.mark.parametrize("home", ["none", "nvme"])
def test_a_script_that_gathers_what_is_not_there(
    start: Callable[..., Any], differing: Callable[..., list[str]], home: str
) -> None:
    engine = start(precision="fp32", offload_param=home, cache_in_host=False)
    values = {name: maybe_zero_3(param) for name, param in engine.named_parameters()}
    assert any(hasattr(param, "ds_id") for param in engine.parameters()) == (home == "nvme")
    assert differing(values, {name: engine.get_fp32_parameter(name) for name in values}) == []


def test_one_rank_of_a_launcher_has_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts make a DistributedSampler after initialize, and do not ask how many ranks there are."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with engine_of(perceptrons()[0], 2):
        try:
            assert list(DistributedSampler([1, 2, 3], shuffle=False)) == [0, 1, 2]
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda out: (out.mean(),), r"needs the loss as a tensor, not tuple"),
        (lambda out: out.mean().item(), r"needs the loss as a tensor, not float"),
        (lambda out: out.detach().mean(), r"the loss does not depend on a parameter"),
        (lambda out: out, r"scalar loss, not shape \(4, 1\)"),
    ],
)
def test_a_loss_that_is_none_leaves_the_engine_as_it_was(loss: Callable[[Tensor], Any], message: str) -> None:
    with engine_of(perceptrons()[0], 2) as engine:
        with pytest.raises(EngineStateError, match=message):
            engine.backward(loss(engine(torch.ones(4, 8))))
        engine.backward(engine(torch.ones(4, 8)).mean())
        engine.step()
        assert engine.was_step_applied()


class Wrapped(nn.Module):
    """As the page for those who come from DeepSpeed says."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self.engine, self.module = engine, engine.module

    def forward(self, data: Tensor) -> Tensor:
        out: Tensor = self.engine(data)
        return out


def test_a_module_around_an_engine() -> None:
    with engine_of(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), 3) as engine:
        wrapped = Wrapped(engine)
        assert [name for name, _ in wrapped.named_parameters()] == ["module.0.weight", "module.0.bias"]
        wrapped.eval()
        assert not engine.training and torch.equal(wrapped(torch.ones(4, 8)), wrapped(torch.ones(4, 8)))
        wrapped.train()
        engine.backward(wrapped(torch.ones(4, 8)).mean())
        engine.step()
        state = wrapped.state_dict()
        assert torch.equal(state["module.0.weight"], engine.get_fp32_parameter("0.weight"))


@pytest.mark.parametrize("home", ["cpu", "nvme"])
def test_what_scripts_do_between_steps_is_the_same_at_every_placement(
    start: Callable[..., Any],
    small_model: type[nn.Module],
    micro_batches: Callable[..., Any],
    differing: Callable[..., list[str]],
    home: str,
) -> None:
    """Values set before initialize and after it, 16-bit first values, boundaries and batch sizes that change."""
    states = []
    for place in ("none", home):
        torch.manual_seed(3)
        with deepspeed.zero.Init(dtype=torch.bfloat16):
            model = small_model()
        with deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=0), torch.no_grad():
            for param in model.parameters():
                param.mul_(1.25)
        tiers = {"offload_param": place, "offload_optimizer": place, "cache_in_host": False}
        engine = start(model, grad_accum_dtype="fp32", sub_group_size=5000, prefetch=3000, **tiers)
        batches = micro_batches(8)
        for micro, (tokens, targets) in enumerate(batches):
            if micro == 2:
                engine.set_train_batch_size(6)
            if micro == 5:
                with deepspeed.zero.GatheredParameters(model.blocks[1].parameters(), modifier_rank=0):
                    for param in model.blocks[1].parameters():
                        param.data.mul_(0.5)
            if micro >= 5:
                engine.set_gradient_accumulation_boundary(micro == 7)
            engine.backward(engine(tokens, targets))
            if micro == 4:
                engine.zero_grad()  # in the midst of an accumulation
            engine.step()
        assert engine.global_steps == 3 and engine.was_step_applied()
        states.append(engine.master_state_dict())
    assert differing(*states) == []


def change(param: nn.Parameter) -> None:
    with deepspeed.zero.GatheredParameters([param]):
        param.data.lerp_(torch.ones_like(param), 0.1)


@pytest.mark.parametrize("home", ["none", "nvme"])
def test_a_change_by_data_in_a_block_that_reads(
    start: Callable[..., Any], home: str, caplog: pytest.LogCaptureFixture
) -> None:
    """torch counts no version of it. A script keeps a moving average like this in the parameters of an engine."""
    engine = start(precision="fp32", offload_param=home, cache_in_host=False)
    param, other = engine.module.blocks[0].up.parameters()
    before = engine.get_fp32_parameter("blocks.0.up.weight")
    with deepspeed.zero.GatheredParameters([param, other]):
        assert torch.equal(param.data, before) and other.data.abs().sum() > 0
    engine.module.norm.register_forward_hook(lambda *_: change(param))
    with pytest.raises(EngineStateError, match=r"blocks.0.up.weight' was changed without modify=True"):
        engine(*next(batches(1)))
    assert torch.equal(engine.get_fp32_parameter("blocks.0.up.weight"), before)
    assert "modifier_rank" not in caplog.text
    change(param)
    assert torch.equal(engine.get_fp32_parameter("blocks.0.up.weight"), before.lerp(torch.ones(()), 0.1))
    assert caplog.text.count("has changed 'blocks.0.up.weight', alike on all ranks: the change is kept") == 1
    before = engine.get_fp32_parameter("blocks.0.up.weight")
    with pytest.raises(EngineStateError, match="was changed without modify"), deepspeed.gathered(param):
        param.data.zero_()
    assert torch.equal(engine.get_fp32_parameter("blocks.0.up.weight"), before)
