"""Views of parameters that leave their module, and changes that torch does not count."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiering
from tiering.errors import ConfigError, EngineStateError, ResidencyError
from zero3.device import nan_memory
from zero3.params.param_group import Residency
from zero3.passes.prefetch import Prefetcher

Start = Callable[..., Any]
WIDTH = 32
PLACEMENTS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"offload_param": "cpu", "offload_optimizer": "cpu"},
    "nvme": {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False},
    "least": {
        "offload_param": "nvme",
        "offload_optimizer": "nvme",
        "cache_in_host": False,
        "prefetch": 0,
    },
}


class Position(nn.Module):
    """Returns views of its parameter, and they are used after it has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, WIDTH))

    def forward(self, count: int) -> dict[str, Any]:
        return {"first": self.table[:count], "pair": (self.table[count], None)}


class Model(nn.Module):
    def __init__(self, edit: Callable[[nn.Parameter], None] | None = None) -> None:
        super().__init__()
        self.position = Position()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.positions = nn.ModuleList(Position() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        for block in self.blocks:
            if edit is not None:
                block.register_forward_pre_hook(lambda module, _: edit(module.weight))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        for at in (self.position, *self.positions):
            parts = at(x.shape[0])
            x = x + parts["first"] + parts["pair"][0]
        for block in self.blocks:
            x = torch.tanh(block(x))
        return (x * self.scale).float().square().mean(), self.scale[None], self.blocks[0].bias


def trained(
    start: Start, model: nn.Module, between: Callable[[Any], None] | None = None, **options: Any
) -> Any:
    engine = start(model, accumulation=1, threshold=0, **options)
    for step in range(4):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        loss, scale, bias = engine(
            x.to(torch.float32 if options.get("precision") == "fp32" else torch.bfloat16)
        )
        assert torch.isfinite(scale).all(), "a view that the model returned has lost its bytes"
        engine.backward(loss + scale.float().sum() * 1e-3 + bias.float().square().sum())
        engine.step()
        if between is not None:
            between(engine)
    return engine


def model_of(edit: Callable[[nn.Parameter], None] | None = None) -> Model:
    torch.manual_seed(1)
    return Model(edit)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_views_that_a_module_returns_keep_their_values(start: Start, differing: Any, placement: str) -> None:
    expected = trained(start, model_of()).master_state_dict()
    outcome = trained(start, model_of(), **PLACEMENTS[placement]).master_state_dict()
    assert differing(outcome, expected) == []


def halve(weight: nn.Parameter) -> None:
    weight.data.mul_(0.5)


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_a_change_through_data_by_the_module_around_counts(
    start: Start, differing: Any, placement: str
) -> None:
    """Which borrows the parameter for that."""

    def run(**where: Any) -> dict[str, Tensor]:
        model = model_of()
        model.register_forward_pre_hook(lambda module, _: halve(module.blocks[1].weight))
        masters: dict[str, Tensor] = trained(start, model, **where).master_state_dict()
        return masters

    expected = run()
    assert differing(run(**PLACEMENTS[placement]), expected) == []
    assert expected["blocks.1.weight"].abs().max() < expected["blocks.0.weight"].abs().max() / 2


def clamp(engine: Any) -> None:
    for block in engine.module.blocks:
        with torch.no_grad():
            block.weight.data.clamp_(-0.01, 0.01)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_changes_through_data_in_forward_count_wherever_the_parameter_lives(
    start: Start, differing: Any, placement: str, precision: str
) -> None:
    """As codebooks do that follow a moving average."""
    expected = trained(start, model_of(halve), precision=precision).master_state_dict()
    untouched = trained(start, model_of(), precision=precision).master_state_dict()
    outcome = trained(
        start, model_of(halve), precision=precision, **PLACEMENTS[placement]
    ).master_state_dict()
    assert differing(outcome, expected) == []
    assert expected["blocks.0.weight"].abs().max() < untouched["blocks.0.weight"].abs().max() / 2


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_changes_through_data_between_steps_reach_the_master(start: Start, precision: str) -> None:
    """As clipping of weights does. The alias may be kept, too."""
    engine = trained(start, model_of(), clamp, precision=precision)
    assert engine.get_fp32_parameter("blocks.0.weight").abs().max() <= 0.0101 + 1e-3
    data = engine.module.blocks[1].weight.data
    for _ in range(2):
        loss, *_ = engine(torch.ones(4, WIDTH, dtype=data.dtype))
        engine.backward(loss)
        data.zero_()
        engine.step()
        assert engine.get_fp32_parameter("blocks.1.weight").abs().max() < 2e-3


def test_nan_of_any_size_costs_one_block_and_is_given_back() -> None:
    def mappings() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    before = mappings()
    memory = nan_memory.map_nan(20 * nan_memory.BLOCK + 12)
    assert memory is not None and len(memory) == 20 * nan_memory.BLOCK + 12
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        shown = torch.frombuffer(memory, dtype=dtype)
        assert shown[:: 1 << 16].isnan().all() and shown[-1].isnan()
    shown[0] = 1
    assert shown[nan_memory.BLOCK // 2].isnan(), "a write went into the block that all of it shows"
    del memory, shown
    assert mappings() == before


def test_memory_that_two_parameters_share_is_refused(start: Start) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(
        ConfigError, match=r"'0\.weight' and '1\.weight' are two parameters that share memory"
    ):
        start(model)
    with torch.inference_mode(), pytest.raises(EngineStateError, match="inference_mode"):
        start(nn.Linear(8, 8))


def test_an_engine_within_the_forward_of_another(start: Start, differing: Any) -> None:
    """As in distillation; its loss reaches the outer engine's gradients by a value kept on a block."""

    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
            self.kept: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x)
            self.kept = (x * self.blocks[1].weight[0]).float().square().mean()
            return x.detach()

    class Student(nn.Module):
        def __init__(self, teacher: Any) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
            self.teacher = [teacher]

        def forward(self, x: Tensor) -> Tensor:
            return (self.blocks[1](self.blocks[0](x)) - self.teacher[0](x)).float().square().mean()

    def run(**placement: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        torch.manual_seed(4)
        teacher = start(Teacher(), accumulation=1, threshold=0, **placement)
        student = start(Student(teacher), accumulation=1, threshold=0, **placement)
        for _ in range(3):
            student.backward(student(torch.ones(4, WIDTH, dtype=torch.bfloat16)))
            teacher.backward(teacher.module.kept)
            student.step()
            teacher.step()
        return student.master_state_dict(), teacher.master_state_dict()

    for outcome, expected in zip(run(**PLACEMENTS["nvme"]), run(), strict=True):
        assert differing(outcome, expected) == []


def test_a_gradient_of_the_input_is_no_step(start: Start) -> None:
    """Asked for by autograd.grad, with accumulation and a loss scale, too: nothing waits to be stepped."""
    engine = start(model_of(), accumulation=2, threshold=0, **PLACEMENTS["nvme"])
    x = torch.ones(4, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    (gradient,) = torch.autograd.grad(engine(x)[0], x)
    assert torch.isfinite(gradient).all() and gradient.abs().sum() > 0
    with pytest.raises(EngineStateError, match="without a backward"):
        engine.step()
    first, second = engine.scale(engine(x)[0]), engine.scale(engine(x)[0])
    first.backward()
    engine.step()
    second.backward()
    engine.step()
    assert engine.global_steps == 1


@pytest.mark.parametrize("whole", [True, False])
def test_a_second_thread_is_refused_while_a_forward_runs(start: Start, whole: bool) -> None:
    engine = start(model_of(), accumulation=1, threshold=0, **PLACEMENTS["nvme"])
    x = torch.ones(4, WIDTH, dtype=torch.bfloat16)
    caught: list[BaseException] = []

    def elsewhere(*_: Any) -> None:
        def call() -> None:
            try:
                engine(x) if whole else engine.module(x)
            except EngineStateError as error:
                caught.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    hook = engine.module.blocks[1].register_forward_hook(elsewhere)
    with torch.no_grad():
        disturbed = engine(x)[0]
        hook.remove()
        assert "second thread" in str(caught[0]) and len(caught) == 1
        assert torch.equal(disturbed, engine(x)[0])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_forked_child_that_uses_the_model_gets_an_error(start: Start, placement: str) -> None:
    engine = start(model_of(), accumulation=1, threshold=0, **PLACEMENTS[placement])
    forking = multiprocessing.get_context("fork")
    messages = forking.Queue()

    def use() -> None:
        try:
            engine.module.blocks[0].weight.norm()
        except ResidencyError as error:
            messages.put(str(error))

    child = forking.Process(target=use)
    child.start()
    assert "the process that forked this one" in messages.get(timeout=60)
    child.join()
    assert child.exitcode == 0
    with torch.no_grad():
        assert torch.isfinite(engine(torch.ones(4, WIDTH, dtype=torch.bfloat16))[0])


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_data_of_another_kind_inside_gathered(start: Start, placement: str, precision: str) -> None:
    """``.data = what was loaded``: cast if it has the shape, refused if not, and no neighbour is touched."""
    engine = start(model_of(), precision=precision, accumulation=1, threshold=0, **PLACEMENTS[placement])
    before = engine.master_state_dict()
    name, weight = "blocks.0.weight", engine.module.blocks[0].weight
    loaded = torch.randn(WIDTH, WIDTH, dtype=torch.float64)
    with tiering.gathered(weight, modify=True):
        weight.data = loaded
    after = engine.master_state_dict()
    assert torch.equal(after.pop(name), loaded.float())
    assert all(torch.equal(value, before[other]) for other, value in after.items())
    for wrong in (torch.zeros(WIDTH * 2, WIDTH // 2), torch.zeros(WIDTH + 1, WIDTH)):
        with (
            pytest.raises(EngineStateError, match=rf"'{name}' of shape \(32, 32\) has dtype torch.float32"),
            tiering.gathered(engine.module.blocks, modify=True),
        ):
            weight.data = wrong
    with pytest.raises(EngineStateError, match="without modify=True"), tiering.gathered(weight):
        weight.data = torch.zeros(WIDTH, WIDTH)
    assert torch.equal(engine.get_fp32_parameter(name), loaded.float())
    assert all(torch.equal(engine.get_fp32_parameter(other), before[other]) for other in after)
    loss, *_ = engine(torch.ones(4, WIDTH, dtype=weight.dtype))
    engine.backward(loss)
    engine.step()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_penalty_that_gathered_made_goes_backward_after_the_block(
    start: Start, differing: Any, placement: str
) -> None:
    def run(**where: Any) -> dict[str, Tensor]:
        engine = start(model_of(), accumulation=1, threshold=0, **where)
        for _ in range(3):
            loss, *_ = engine(torch.ones(4, WIDTH, dtype=torch.bfloat16))
            with tiering.gathered(engine.module.blocks):
                for block in engine.module.blocks:
                    loss = loss + block.weight.abs().mean() + block.weight.float().pow(2).mean()
            engine.backward(loss)
            engine.step()
        assert engine.skipped_steps == 0
        masters: dict[str, Tensor] = engine.master_state_dict()
        return masters

    assert differing(run(**PLACEMENTS[placement]), run()) == []


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_loss_that_was_made_by_a_part_of_the_model(start: Start, differing: Any, placement: str) -> None:
    """By a method, or through one block: the whole is never called."""

    def run(threshold: int, **where: Any) -> dict[str, Tensor]:
        engine = start(model_of(), accumulation=1, threshold=threshold, **where)
        for _ in range(3):
            x = engine.module.blocks[0](torch.ones(4, WIDTH, dtype=torch.bfloat16))
            engine.backward(engine.module.blocks[1](x).float().square().mean())
            engine.step()
            x = engine.module.blocks[2](torch.ones(4, WIDTH, dtype=torch.bfloat16))
            x.float().square().mean().backward()
            engine.step()
        masters: dict[str, Tensor] = engine.master_state_dict()
        return masters

    for threshold in (0, 10**6):
        assert differing(run(threshold, **PLACEMENTS[placement]), run(threshold)) == []


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_fast_path_of_torchs_encoder_is_taken_wherever_its_layers_live(
    start: Start, placement: str
) -> None:
    def build() -> nn.Module:
        torch.manual_seed(6)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 64, batch_first=True, dropout=0.0)
        return nn.TransformerEncoder(layer, 3)

    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    padding = torch.tensor([[False, False, False, True, True], [False] * 5])
    options: dict[str, Any] = {"precision": "fp32", "accumulation": 1, "threshold": 0}
    plain = build().eval()
    engine = start(build(), **options, **PLACEMENTS[placement])
    engine.eval()
    with torch.no_grad():
        expected = plain(x, src_key_padding_mask=padding)
        output = engine(x, src_key_padding_mask=padding)
        assert (expected[0, 3:] == 0).all(), "torch did not take its fast path: this shows nothing"
        assert torch.equal(output, expected)
    if placement != "device" and placement != "host":
        with pytest.raises(ResidencyError):
            engine.module.layers[0].linear1.weight.norm()
    engine.train()
    engine.backward(engine(x, src_key_padding_mask=padding).square().mean())
    engine.step()


def test_a_hook_of_the_users_that_raises_before_ours_leaves_everything_balanced(start: Start) -> None:
    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                try:
                    x = block(x)
                except ValueError:
                    hook.remove()
                    x = block(x)
            return x

    engine = start(Stubborn(), accumulation=1, threshold=0, **PLACEMENTS["nvme"])

    def fail(*_: Any) -> None:
        raise ValueError("not this time")

    hook = engine.module.blocks[1].register_forward_pre_hook(fail, prepend=True)
    x = torch.ones(4, WIDTH, dtype=torch.bfloat16)
    disturbed = engine(x)
    assert hook.id not in engine.module.blocks[1]._forward_pre_hooks
    assert torch.equal(disturbed, engine(x))
    engine.backward(disturbed.float().square().mean())
    engine.step()


def test_many_groups_are_looked_through_once() -> None:
    """Whatever is fetched ahead already is not looked at again for each module: 2,000 groups are no 4,000,000 looks."""
    looks = 0

    class Group:
        moves, through_window, sharded, stays = True, False, False, False
        routing = None

        def __init__(self) -> None:
            self.state = Residency.SHARDED

        @property
        def residency(self) -> Residency:
            nonlocal looks
            looks += 1
            return self.state

        def unshard(self, *, wait: bool = False) -> bool:
            self.state = Residency.FETCHING
            return True

        def wait_for_unshard(self) -> None:
            self.state = Residency.UNSHARDED

        def reshard(self) -> None:
            self.state = Residency.SHARDED

    groups: list[Any] = [Group() for _ in range(2000)]
    prefetcher = Prefetcher()
    for _ in range(3):
        looks = 0
        prefetcher.begin_pass(True)
        for group in (*groups, *reversed(groups)):
            prefetcher.acquire(group)
            assert group.state is Residency.UNSHARDED
            prefetcher.release(group)
        prefetcher.end_pass()
    assert looks < 4000 * 300
