"""Every way to touch a parameter from outside of the engine's passes: the right value or a clear error."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tiering
from optim_cpu.formats import round_parameters
from tiering.errors import ConfigError, EngineStateError, ResidencyError
from zero3.state.tensors import TieredState

Start = Callable[..., Any]
ON_DEVICE: dict[str, Any] = {}
ON_HOST = {"offload_param": "cpu", "offload_optimizer": "cpu"}
STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}
PLACEMENTS = pytest.mark.parametrize(
    "placement", [ON_DEVICE, ON_HOST, STREAMED], ids=["device", "host", "nvme"]
)
UP = "blocks.0.up.weight"


def trained(engine: Any, micro_batches: Any, steps: int = 2) -> Any:
    for tokens, targets in micro_batches(steps * engine.settings.gradient_accumulation_steps):
        engine.backward(engine(tokens, targets))
        engine.step()
    return engine


def rounded(master: Tensor) -> Tensor:
    out = torch.empty_like(master, dtype=torch.bfloat16)
    round_parameters(master, out)
    return out


ACCESSES: dict[str, Callable[[nn.Parameter], Any]] = {
    "norm": lambda p: p.norm(),
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "clone": lambda p: p.clone(),
    "item": lambda p: p[0, 0].item(),
    "numpy": lambda p: p.detach().numpy(),
    "add_": lambda p: p.add_(1),
    "copy_ of another": lambda p: p.copy_(p),
    "data =": lambda p: setattr(p, "data", torch.zeros(192, 48)),
    "linear": lambda p: functional.linear(torch.zeros(1, 48, dtype=p.dtype), p),
    "stack": lambda p: torch.stack([p, p]),
    "to": lambda p: p.to(torch.float64),
    "T": lambda p: p.T,
    "==": lambda p: p == 0,
    "save": lambda p: p.untyped_storage(),
    "data_ptr": lambda p: p.data_ptr(),
}


@pytest.mark.parametrize("access", ACCESSES)
def test_what_needs_values_that_are_elsewhere_raises_and_says_what_to_do(start: Start, access: str) -> None:
    weight = start(**STREAMED).module.blocks[0].up.weight
    with torch.no_grad(), pytest.raises(ResidencyError, match=rf"{UP}.*on NVMe.*tiering\.gathered"):
        ACCESSES[access](weight)


def test_what_needs_no_values_is_as_always(start: Start) -> None:
    weight = start(**STREAMED).module.blocks[0].up.weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.device.type) == ((192, 48), torch.bfloat16, "cpu")
    assert (
        weight.numel() == 192 * 48 and weight.size(0) == 192 and weight.requires_grad and weight.grad is None
    )
    assert torch.equal(torch.zeros_like(weight), torch.zeros(192, 48, dtype=torch.bfloat16))
    assert weight.stride() == (48, 1) and weight.stride(0) == 48 and weight.is_contiguous()
    assert hash(weight) == id(weight) and weight in {weight} and weight.is_leaf
    assert UP in repr(weight) and "NVMe" in repr(weight)


def test_calls_on_the_model_that_need_values(start: Start) -> None:
    module = start(**STREAMED).module
    with pytest.raises(ResidencyError, match=r"gathered"):
        module.double()
    with pytest.raises(ResidencyError, match=r"gathered"):
        nn.utils.parameters_to_vector(module.parameters())


@PLACEMENTS
def test_copies_of_the_model_have_its_values(start: Start, micro_batches: Any, placement: Any) -> None:
    """state_dict, deepcopy, pickle and torch.save of the model or of a part; a copy is an ordinary model."""
    engine = trained(start(accumulation=1, **placement), micro_batches)
    expected = engine.state_dict()
    of_module = engine.module.state_dict()
    assert list(of_module) == list(expected)
    assert of_module["head.weight"].data_ptr() == of_module["embedding.weight"].data_ptr(), "the tie is lost"
    copied = copy.deepcopy(engine.module)
    stored = io.BytesIO()
    torch.save(engine.module.blocks[1].state_dict(prefix="blocks.1."), stored)
    stored.seek(0)
    for state in (of_module, copied.state_dict(), torch.load(stored)):
        assert all(torch.equal(value, expected[name]) for name, value in state.items())
    unpickled = pickle.loads(pickle.dumps(engine.module.blocks[1]))
    assert torch.equal(unpickled.up.weight, expected["blocks.1.up.weight"])
    tokens, targets = next(iter(micro_batches(1)))
    loss = copied(tokens, targets)
    assert torch.equal(loss, engine(tokens, targets))
    loss.backward()
    assert copied.head.weight is copied.embedding.weight and copied.head.weight.grad.abs().sum() > 0
    with torch.no_grad():
        copied.blocks[0].up.weight.zero_()
    assert torch.equal(engine.state_dict()[UP], expected[UP])


@PLACEMENTS
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_gathered_shows_the_values_and_modify_sets_the_master(
    start: Start, micro_batches: Any, placement: Any, precision: str
) -> None:
    engine = trained(start(accumulation=1, precision=precision, **placement), micro_batches)
    weight, master = engine.module.blocks[0].up.weight, engine.get_fp32_parameter(UP)
    with tiering.gathered(weight) as shown:
        assert shown is weight
        assert torch.equal(weight.detach().float(), engine.state_dict()[UP].float())
    with tiering.gathered(engine.module, modify=True), torch.no_grad():
        assert all(
            torch.equal(p.detach(), engine.state_dict()[n]) for n, p in engine.module.named_parameters()
        )
        weight[3] = 0.5
    expected = master.clone()
    expected[3] = 0.5
    assert torch.equal(engine.get_fp32_parameter(UP), expected), "bits below the compute dtype are lost"
    assert torch.equal(engine.state_dict()[UP][3].float(), torch.full((48,), 0.5))
    trained(engine, micro_batches, 1)
    assert not torch.equal(engine.get_fp32_parameter(UP), expected)
    assert (engine.get_fp32_parameter(UP)[3] - 0.5).abs().max() < 0.01, "the step did not start from the edit"


@PLACEMENTS
def test_every_edit_counts_wherever_the_parameter_lives(
    start: Start, micro_batches: Any, differing: Any, placement: Any
) -> None:
    """In place inside forward, inside gathered, and, where the parameter is plain, between steps."""

    def run(**where: Any) -> dict[str, Tensor]:
        engine = start(accumulation=1, **where)

        def clamp(module: nn.Linear, args: Any) -> None:
            with torch.no_grad():
                module.weight.clamp_(-0.02, 0.02)

        engine.module.blocks[1].down.register_forward_pre_hook(clamp)
        for tokens, targets in micro_batches(4):
            engine.backward(engine(tokens, targets))
            engine.step()
            with tiering.gathered(engine.module.norm.weight, modify=True) as scale, torch.no_grad():
                scale.mul_(1.01)
            # Of the block that is fetched ahead by now: the next forward has to see it.
            with tiering.gathered(engine.module.blocks[0].up.weight, modify=True) as up, torch.no_grad():
                up[:9].neg_()
        masters: dict[str, Tensor] = engine.master_state_dict()
        return masters

    masters = run(**placement)
    assert masters["blocks.1.down.weight"].abs().max() < 0.03
    assert (masters["norm.weight"] > 1.02).all()
    assert differing(masters, run()) == []


def test_an_edit_of_a_plain_parameter_between_steps_reaches_its_master(
    start: Start, micro_batches: Any
) -> None:
    engine = trained(start(accumulation=1), micro_batches)
    with torch.no_grad():
        engine.module.blocks[0].up.weight[0].fill_(0.25)
    trained(engine, micro_batches, 1)
    assert (engine.get_fp32_parameter(UP)[0] - 0.25).abs().max() < 0.01


def test_gathered_without_modify_drops_a_change_and_says_so(start: Start) -> None:
    engine = start(**STREAMED)
    before = engine.state_dict()[UP]
    weight = engine.module.blocks[0].up.weight
    with (
        pytest.raises(EngineStateError, match=rf"{UP}.*modify=True"),
        torch.no_grad(),
        tiering.gathered(weight),
    ):
        weight.zero_()
    assert torch.equal(engine.state_dict()[UP], before)


@PLACEMENTS
def test_the_model_runs_and_trains_while_gathered(start: Start, micro_batches: Any, placement: Any) -> None:
    engine = trained(start(accumulation=1, **placement), micro_batches)
    tokens, targets = next(iter(micro_batches(1)))
    with torch.no_grad():
        plain = engine(tokens, targets)
    with tiering.gathered(engine.module, modify=True):
        loss = engine(tokens, targets)
        assert torch.equal(loss.detach(), plain)
        with torch.no_grad():
            engine.module.blocks[0].down.weight.zero_()
            engine.module.blocks[0].down.bias.zero_()
            assert not torch.equal(engine(tokens, targets), plain), "the forward did not see the edit"
        engine.backward(engine(tokens, targets))
        with pytest.raises(EngineStateError, match="inside tiering"):
            engine.step()
    engine.step()
    assert engine.get_fp32_parameter("blocks.0.down.weight").abs().max() < 0.01


def test_a_penalty_on_gathered_parameters_reaches_their_gradients(
    start: Start, micro_batches: Any, differing: Any
) -> None:
    def run(**where: Any) -> dict[str, Tensor]:
        engine = start(accumulation=1, **where)
        for tokens, targets in micro_batches(3):
            loss = engine(tokens, targets)
            with tiering.gathered(engine.module.blocks.parameters()) as params:
                loss = loss + 0.1 * sum(p.float().square().sum() for p in params)
            engine.backward(loss)
            engine.step()
        masters: dict[str, Tensor] = engine.master_state_dict()
        return masters

    assert differing(run(**STREAMED), run()) == []


@PLACEMENTS
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_get_and_set_of_everything_by_name(
    start: Start, micro_batches: Any, placement: Any, precision: str
) -> None:
    engine = trained(start(accumulation=1, precision=precision, **placement), micro_batches)
    for name, param in engine.module.named_parameters():
        value = torch.randn(param.shape)
        engine.set_fp32_parameter(name, value)
        assert torch.equal(engine.get_fp32_parameter(name), value)
        expected = rounded(value) if precision == "bf16" else value
        assert torch.equal(engine.state_dict()[name], expected)
        for key in ("exp_avg", "exp_avg_sq"):
            assert engine.get_fp32_state(name, key).abs().sum() > 0
            moment = torch.rand(param.shape)
            engine.set_fp32_state(name, key, moment)
            assert torch.equal(engine.get_fp32_state(name, key), moment)
    assert engine.state_names == ("exp_avg", "exp_avg_sq")
    # A step from known state: the update is the formula's.
    for name, param in engine.module.named_parameters():
        engine.set_fp32_parameter(name, torch.ones(param.shape))
        engine.set_fp32_state(name, "exp_avg", torch.zeros(param.shape))
        engine.set_fp32_state(name, "exp_avg_sq", torch.zeros(param.shape))
    tokens, targets = next(iter(micro_batches(1)))
    engine.backward(engine(tokens, targets))
    # The step has begun to read its state by now.
    engine.set_fp32_state(UP, "exp_avg_sq", torch.full((192, 48), 4.0))
    assert engine.get_fp32_gradient(UP).shape == (192, 48)
    for name, param in engine.module.named_parameters():
        engine.set_fp32_gradient(name, torch.full(param.shape, 2.0))
        assert torch.equal(engine.get_fp32_gradient(name), torch.full(param.shape, 2.0))
    count = sum(p.numel() for p in engine.module.parameters())
    assert engine.get_global_grad_norm() == pytest.approx(2 * count**0.5, rel=1e-9)
    engine.step()
    assert engine.get_fp32_gradient(UP) is None
    assert (engine.get_fp32_state(UP, "exp_avg_sq") > 3.9).all(), "what was set after backward is lost"
    clipped = 2.0 / (2 * count**0.5)
    assert torch.allclose(
        engine.get_fp32_state(UP, "exp_avg"), torch.full((192, 48), 0.1 * clipped), rtol=1e-3
    )


def test_access_by_name_refuses_what_is_not_there(start: Start) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    engine = start(model, threshold=0)
    with pytest.raises(ConfigError, match=r"no parameter '0\.wait'"):
        engine.get_fp32_parameter("0.wait")
    with pytest.raises(ConfigError, match=r"shape \(8, 8\), not \(8,\)"):
        engine.set_fp32_parameter("0.weight", torch.zeros(8))
    with pytest.raises(EngineStateError, match="no state 'momentum'; it has: exp_avg, exp_avg_sq"):
        engine.get_fp32_state("1.weight", "momentum")
    with pytest.raises(ConfigError, match=r"'0\.weight' is frozen"):
        engine.get_fp32_state("0.weight", "exp_avg")
    with pytest.raises(ConfigError, match=r"'0\.weight' is frozen"):
        engine.set_fp32_gradient("0.weight", torch.zeros(8, 8))
    engine.set_fp32_parameter("0.weight", torch.full((8, 8), 3.0))
    assert torch.equal(engine.get_fp32_parameter("0.weight"), torch.full((8, 8), 3.0))


@PLACEMENTS
def test_changes_during_a_pass_are_refused(start: Start, micro_batches: Any, placement: Any) -> None:
    engine = start(accumulation=1, **placement)
    refused = []

    def change(*_: Any) -> None:
        for attempt in (
            lambda: engine.set_fp32_parameter(UP, torch.zeros(192, 48)),
            lambda: tiering.gathered(engine.module.norm, modify=True).__enter__(),
        ):
            with pytest.raises(EngineStateError, match="between passes"):
                attempt()
            refused.append(True)

    engine.module.blocks[1].register_forward_hook(change)
    tokens, targets = next(iter(micro_batches(1)))
    engine.backward(engine(tokens, targets))
    engine.step()
    assert len(refused) == 2


@PLACEMENTS
def test_after_close_every_use_says_so(start: Start, micro_batches: Any, placement: Any) -> None:
    engine = start(accumulation=1, **placement)
    tokens, targets = next(iter(micro_batches(1)))
    loss = engine(tokens, targets)
    engine.close()
    for use in (
        lambda: engine.module.blocks[0].up.weight.norm(),
        lambda: engine.module(tokens, targets),
        lambda: engine.module.state_dict(),
        lambda: copy.deepcopy(engine.module),
    ):
        with pytest.raises(ResidencyError, match="engine is closed"):
            use()
    with pytest.raises(EngineStateError, match="after close"):
        loss.backward()
    with pytest.raises(EngineStateError, match="engine is closed"), tiering.gathered(engine.module):
        pass
    with pytest.raises(EngineStateError, match=r"'embedding\.weight' belonged to an engine that was closed"):
        start(engine.module)


@PLACEMENTS
def test_clipping_by_hand_is_told_that_it_does_nothing(
    start: Start, micro_batches: Any, caplog: pytest.LogCaptureFixture, placement: Any
) -> None:
    def warnings() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.levelno >= logging.WARNING]

    engine = start(accumulation=1, **placement)
    for number, (tokens, targets) in enumerate(micro_batches(2)):
        engine.optimizer.zero_grad()
        engine.backward(engine(tokens, targets))
        assert not warnings(), "a loop that does nothing wrong is warned"
        if number:
            nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0)
            nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0)
        engine.step()
    (record,) = warnings()
    assert "gradient_clipping" in record.getMessage() and ".grad was read" in record.getMessage()


def test_an_engine_says_that_it_cannot_be_copied(start: Start) -> None:
    engine = start(accumulation=1)
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(EngineStateError, match=r"copy engine\.module"):
            attempt(engine)


def test_a_state_dict_that_failed_half_way_leaves_no_old_values(start: Start, micro_batches: Any) -> None:
    engine = trained(start(accumulation=1, **STREAMED), micro_batches)

    def fail(*_: Any) -> None:
        raise RuntimeError("not now")

    hook = engine.module.norm.register_state_dict_pre_hook(fail)
    with pytest.raises(RuntimeError, match="not now"):
        engine.module.state_dict()
    hook.remove()
    trained(engine, micro_batches, 1)
    with pytest.raises(ResidencyError):
        engine.module.blocks[0].up.weight.detach()
    state, expected = engine.module.state_dict(), engine.state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_a_write_that_fails_takes_all_loans_back(
    start: Start, micro_batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = trained(start(accumulation=1, **STREAMED), micro_batches)
    follow, failing = TieredState.store_edit, engine.module.blocks[0].up.weight

    def fail_once(state: TieredState, group: Any, piece: Any, values: Tensor, **how: bool) -> None:
        if piece.name == UP:
            raise OSError(5, "no disk")
        follow(state, group, piece, values, **how)

    monkeypatch.setattr(TieredState, "store_edit", fail_once)

    def zero() -> None:
        with tiering.gathered(engine.module, modify=True), torch.no_grad():
            for param in engine.module.parameters():
                param.zero_()

    with pytest.raises(OSError, match="no disk"):
        zero()
    with pytest.raises(ResidencyError):
        failing.norm()
    assert engine.state_dict()["blocks.2.down.weight"].abs().max() == 0
    trained(engine, micro_batches, 1)
