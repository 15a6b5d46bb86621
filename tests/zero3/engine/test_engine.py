"""The engine as a training loop meets it: habits and mistakes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from optim_cpu.formats import split
from tests.zero3.inside import wait_for_transfers
from tests.zero3.mixture import Mixture, mixture, train_mixture
from tiering.errors import EngineStateError, ResidencyError
from tiering.placement.workload import Tier
from tiering.storage import arena
from tiering.telemetry import EndStatus, find_status_files
from zero3.params.param_group import Residency

STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}
ON_DEVICE: dict[str, Any] = {}


def test_experts_frozen_shared_and_unused_modules(
    start: Callable[..., Any], differing: Callable[..., list[str]]
) -> None:
    experts = [0, 1, 0, 3, 1, 0]
    original = {name: p.detach().clone() for name, p in mixture().named_parameters()}
    resident = start(mixture(), accumulation=1, threshold=0)
    moved = start(mixture(), accumulation=1, threshold=0, **STREAMED)
    assert train_mixture(resident, experts) == train_mixture(moved, experts)
    masters = moved.master_state_dict()
    assert differing(resident.master_state_dict(), masters) == []
    changed = {name for name in masters if not torch.equal(masters[name], original[name])}
    trained = {name for name in masters if name.startswith(("first", "twice")) or name[:9] in
               {"experts.0", "experts.1", "experts.3"}}  # fmt: skip
    assert changed == trained
    assert not any(name.startswith("frozen") for name in masters)
    weights = moved.state_dict()
    for name in ("frozen.weight", "unused.weight", "unused.bias"):
        assert torch.equal(weights[name], split(original[name])[0]), name
    assert all(torch.equal(weights[name], split(masters[name])[0]) for name in masters)


def test_values_just_between_two_bf16_are_rounded_one_way(start: Callable[..., Any]) -> None:
    """At first, by the kernels, and where a slot is written back with parameters that were not stepped."""
    model = mixture()
    with torch.no_grad():
        for param in model.parameters():
            param.view(torch.int32).bitwise_and_(~0xFFFF).bitwise_or_(0x8000)
    original = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = start(model, accumulation=1, threshold=0, **STREAMED)
    weights = engine.state_dict()
    assert all(torch.equal(weights[name], split(original[name])[0]) for name in original)
    train_mixture(engine, [0])
    weights, masters = engine.state_dict(), engine.master_state_dict()
    assert torch.equal(masters["unused.weight"], original["unused.weight"])
    assert not torch.equal(weights["unused.weight"], original["unused.weight"].bfloat16())
    assert all(torch.equal(weights[name], split(masters[name])[0]) for name in masters)


def test_a_parameter_without_gradient_keeps_its_step_count(start: Callable[..., Any]) -> None:
    """As torch does: expert 3 takes its first step at the third update and must be corrected for bias as step 1."""
    engine = start(mixture(), accumulation=1, threshold=0, clip=0.0, optimizer={"weight_decay": 0.0})
    before = engine.master_state_dict()["experts.3.weight"].clone()
    train_mixture(engine, [0, 1, 3])
    moved = (engine.master_state_dict()["experts.3.weight"] - before).abs()
    # Adam's first step moves each element by lr, whatever its gradient; a third step would be 0.3 to 0.6 lr.
    assert float(moved.median()) == pytest.approx(1e-3, rel=0.02)


def test_a_parameter_that_only_an_earlier_micro_batch_used_joins_the_norm(
    start: Callable[..., Any], differing: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradient is on NVMe by then, and the staging slots are read ahead: the norm must not wait for one."""
    monkeypatch.setattr(arena, "STARVED_AFTER_SECONDS", 2.0)
    resident = start(mixture(), threshold=0)
    moved = start(mixture(), threshold=0, host_budget="140KiB", **STREAMED)
    assert Tier.NVME in moved.plan.grad_tiers
    for engine in (resident, moved):
        train_mixture(engine, [0, 1, 1, 2])
    assert moved.get_global_grad_norm() == resident.get_global_grad_norm()
    assert differing(resident.master_state_dict(), moved.master_state_dict()) == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(start: Callable[..., Any], micro_batches: Any, reentrant: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = x + self.inner(x)
            return result

    class Stack(nn.Module):
        def __init__(self, checkpointed: bool) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.checkpointed = checkpointed

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant) if self.checkpointed else block(x)
            return x.float().pow(2).mean()

    def losses(checkpointed: bool) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(2)
        engine = start(Stack(checkpointed), accumulation=1, threshold=0, **STREAMED)
        generator = torch.Generator().manual_seed(1)
        losses = []
        for _ in range(3):
            x = torch.randn(4, 32, generator=generator).bfloat16().requires_grad_()
            loss = engine(x)
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        return losses, engine.master_state_dict()

    plain, masters = losses(False)
    recomputed, same = losses(True)
    assert recomputed == plain
    assert all(torch.equal(masters[name], same[name]) for name in masters)


@pytest.mark.parametrize("placement", [ON_DEVICE, STREAMED])
def test_gradients_that_are_not_finite_skip_the_step(
    start: Callable[..., Any],
    differing: Callable[..., list[str]],
    caplog: pytest.LogCaptureFixture,
    placement: dict[str, Any],
) -> None:
    engine = start(mixture(), accumulation=1, **placement)
    train_mixture(engine, [0])
    before = engine.master_state_dict()
    loss = engine(torch.full((4, 32), float("inf"), dtype=torch.bfloat16), 0)
    engine.backward(loss)
    engine.step()
    assert engine.skipped_steps == 1
    assert "gradient of 'first.weight' is not finite" in caplog.text
    assert differing(engine.master_state_dict(), before) == []
    train_mixture(engine, [0])
    assert differing(engine.master_state_dict(), before) != []


def test_an_exception_in_forward_or_backward_leaves_the_engine_usable(
    start: Callable[..., Any], differing: Callable[..., list[str]]
) -> None:
    class Faulty(Mixture):
        fail = ""

        def forward(self, x: Tensor, expert: int) -> Tensor:
            if self.fail == "forward":
                self.first(x)
                raise KeyboardInterrupt
            loss = super().forward(x, expert)
            if self.fail == "backward":

                def stop(gradient: Tensor) -> None:
                    raise KeyboardInterrupt

                assert loss.grad_fn is not None
                hidden = self.first(x)
                hidden.register_hook(stop)
                loss = loss + hidden.float().mean()
            return loss

    torch.manual_seed(5)
    disturbed = start(Faulty(), accumulation=1, threshold=0, **STREAMED)
    calm = start(mixture(), accumulation=1, threshold=0)
    for where in ("forward", "backward"):
        disturbed.module.fail = where
        with pytest.raises(KeyboardInterrupt):
            disturbed.backward(disturbed(torch.ones(4, 32, dtype=torch.bfloat16), 1))
        disturbed.module.fail = ""
        with pytest.raises(ResidencyError):
            disturbed.module.first.weight.norm()
    assert train_mixture(disturbed, [0, 1, 2]) == train_mixture(calm, [0, 1, 2])
    assert differing(disturbed.master_state_dict(), calm.master_state_dict()) == []


def test_evaluation_between_steps_changes_nothing(train: Callable[..., Any], start: Callable[..., Any],
                                                  micro_batches: Any) -> None:  # fmt: skip
    reference = train(3, **STREAMED)
    engine = start(**STREAMED)
    losses = []
    for tokens, targets in micro_batches(6):
        with torch.no_grad():
            first = engine.eval()(tokens, targets).item()
        engine.train()
        loss = engine(tokens, targets)
        assert loss.item() == first
        losses.append(first)
        engine.backward(loss)
        engine.step()
    assert losses == reference.losses


def test_evaluation_right_after_training_with_room_for_few_groups(
    start: Callable[..., Any], micro_batches: Any
) -> None:
    """What was fetched ahead for training is dropped while its reads are in flight: the room comes back a bit later."""
    engine = start(device_budget="256KiB", **STREAMED)
    for tokens, targets in micro_batches(4):
        engine.backward(engine(tokens, targets))
        engine.step()
        with torch.no_grad():
            assert torch.isfinite(engine(tokens, targets))


def test_loss_backward_works_for_one_micro_batch_and_explains_itself_for_more(
    start: Callable[..., Any], train: Callable[..., Any], micro_batches: Any
) -> None:
    reference = train(2, accumulation=1, **STREAMED)
    engine = start(accumulation=1, **STREAMED)
    for tokens, targets in micro_batches(2):
        engine(tokens, targets).backward()
        engine.step()
    assert torch.equal(engine.master_state_dict()["norm.bias"], reference.masters["norm.bias"])

    several = start(accumulation=2, **STREAMED)
    tokens, targets = next(micro_batches(1))
    with pytest.raises(EngineStateError, match=r"call engine\.backward\(loss\)"):
        several(tokens, targets).backward()
    several.backward(several(tokens, targets))


def test_param_groups_and_scheduler(nvme: Path, start: Callable[..., Any]) -> None:
    model = mixture()
    decayed = [p for name, p in model.named_parameters() if name.endswith("weight") and p.requires_grad]
    others = [p for name, p in model.named_parameters() if name.endswith("bias") and p.requires_grad]
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0, "lr": 0.0}]
    engine = start(model, model_parameters=groups, accumulation=1, threshold=0, **STREAMED)
    before = engine.master_state_dict()
    engine.lr_scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, step_size=1, gamma=0.5)
    train_mixture(engine, [0, 0])
    after = engine.master_state_dict()
    assert torch.equal(before["first.bias"], after["first.bias"]), "a bias moved although its lr is 0"
    assert not torch.equal(before["first.weight"], after["first.weight"])
    assert [group["lr"] for group in engine.optimizer.param_groups] == [1e-3 / 4, 0.0]


def test_weight_decay_is_applied_once_and_only_where_asked(start: Callable[..., Any]) -> None:
    class Still(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((64,), 2.0))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * x).sum()

    engine = start(Still(), accumulation=1, precision="fp32", optimizer={"lr": 0.125, "weight_decay": 0.5})
    engine.backward(engine(torch.zeros(64)))
    engine.step()
    assert engine.master_state_dict()["weight"].tolist() == [2.0 * (1 - 0.125 * 0.5)] * 64


@pytest.mark.parametrize("options", [{"host_budget": "400KiB"}, {"precision": "fp32"}, {"accumulation": 1}])
def test_bytes_moved_in_a_steady_step_are_the_planned_ones(
    start: Callable[..., Any], micro_batches: Any, options: dict[str, Any]
) -> None:
    engine = start(**STREAMED, **options)
    streams_gradients = Tier.NVME in engine.plan.grad_tiers
    assert streams_gradients == ("host_budget" in options)

    def moved_when_quiet() -> tuple[int, int]:
        wait_for_transfers(engine)
        (path,) = engine.snapshot().io
        return path.read.bytes, path.written.bytes

    totals = []
    for number, (tokens, targets) in enumerate(micro_batches(5 * (options.get("accumulation", 2)))):
        engine.backward(engine(tokens, targets))
        engine.step()
        if engine.global_steps in (2, 5) and number + 1 == engine.global_steps * options.get(
            "accumulation", 2
        ):
            totals.append(moved_when_quiet())
    read, written = engine.plan.nvme_traffic()
    assert (totals[1][0] - totals[0][0], totals[1][1] - totals[0][1]) == (3 * read, 3 * written)


def test_budgets_are_ceilings(train: Callable[..., Any]) -> None:
    run = train(host_budget="700KiB", device_budget="300KiB", **STREAMED)
    for tier in run.snapshot.tiers:
        assert tier.used <= tier.peak <= tier.budget
        assert sum(tier.by_kind.values()) == tier.used
    assert next(tier for tier in run.snapshot.tiers if tier.name == "nvme").used > 0


def test_calls_in_the_wrong_order(start: Callable[..., Any], micro_batches: Any) -> None:
    engine = start(**STREAMED)
    tokens, targets = next(micro_batches(1))
    with pytest.raises(EngineStateError, match="without a backward"):
        engine.step()
    with pytest.raises(EngineStateError, match="scalar loss"):
        engine.backward(torch.zeros(2, requires_grad=True))
    engine.backward(engine(tokens, targets))
    engine.step()
    with pytest.raises(EngineStateError, match="without a backward"):
        engine.step()
    engine.close()
    engine.close()
    for call in (lambda: engine(tokens, targets), engine.step, engine.state_dict):
        with pytest.raises(EngineStateError, match="after close"):
            call()


@pytest.mark.parametrize("placement", [ON_DEVICE, STREAMED])
def test_a_graph_of_before_the_step_is_refused_after_it(
    start: Callable[..., Any], micro_batches: Any, placement: dict[str, Any]
) -> None:
    """As torch refuses it: its gradients would mix parameters of two steps."""
    engine = start(accumulation=1, **placement)
    tokens, targets = next(micro_batches(1))
    loss, stale = engine(tokens, targets), engine(tokens, targets)
    engine.backward(loss)
    engine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(stale)
    engine.backward(engine(tokens, targets))
    engine.step()
    assert engine.global_steps == 2


def test_forked_data_workers_neither_disturb_nor_hang(start: Callable[..., Any], train: Callable[..., Any],
                                                      micro_batches: Any) -> None:  # fmt: skip
    reference = train(2, **STREAMED)
    engine = start(**STREAMED)
    samples = [(tokens[i], targets[i]) for tokens, targets in micro_batches(4) for i in range(2)]
    workers = torch.utils.data.DataLoader(
        samples, batch_size=2, num_workers=2, multiprocessing_context="fork"
    )
    for tokens, targets in workers:
        engine.backward(engine(tokens, targets))
        engine.step()
    masters = engine.master_state_dict()
    assert all(torch.equal(masters[name], reference.masters[name]) for name in masters)


def test_telemetry_shows_the_run(start: Callable[..., Any], micro_batches: Any, tmp_path: Path) -> None:
    pages = tmp_path / "run"
    pages.mkdir(mode=0o700)
    engine = start(run_name="seen", telemetry={"enabled": True, "dir": str(pages)}, **STREAMED)
    for tokens, targets in micro_batches(4):
        engine.backward(engine(tokens, targets))
        engine.step()
    engine._observation.publisher.publish_now()
    (page,) = find_status_files(pages)
    reading = page.read()
    assert reading.state == "live"
    assert reading.snapshot is not None
    assert (reading.snapshot.run_name, reading.snapshot.step) == ("seen", 2)
    assert reading.snapshot.io[0].written.bytes > 0
    assert reading.snapshot.loss is not None
    engine.close()
    last = page.read()
    assert last.state == "stale" and last.snapshot is not None
    assert (last.snapshot.ended, last.snapshot.step) == (EndStatus("finished"), 2)


def test_a_forward_whose_graph_is_dropped_leaves_no_activations(start: Callable[..., Any]) -> None:
    engine = start(mixture(), threshold=0, **STREAMED)

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    x = torch.ones(4, 32, dtype=torch.bfloat16)
    engine(x, 0)
    before = tensors()
    for _ in range(20):
        engine(x, 0)
    assert tensors() <= before


def test_what_would_be_skipped_in_silence_is_refused(start: Callable[..., Any]) -> None:
    engine = start(mixture(), accumulation=1, threshold=0, **STREAMED)
    engine.backward(engine(torch.ones(4, 32, dtype=torch.bfloat16), 0))
    with pytest.raises(EngineStateError, match=r"call engine\.step\(\)"):
        engine.optimizer.step()
    engine.module.frozen.requires_grad_(True)
    with pytest.raises(
        EngineStateError, match=r"'frozen\.weight' was frozen at initialize.*Unfreeze all parameters"
    ):
        engine.step()
    engine.module.frozen.requires_grad_(False)
    engine.step()
    assert engine.global_steps == 1


def test_what_was_fetched_ahead_in_vain_is_not_used_after_a_step(
    start: Callable[..., Any], differing: Callable[..., list[str]]
) -> None:
    """Expert 0 is trained by the first micro-batch, fetched ahead in the second, not used there, and then updated."""
    experts = [0, 0, 0, 1, 0, 1, 0, 1, 0, 0]
    resident = start(mixture(), accumulation=2, threshold=0)
    moved = start(mixture(), accumulation=2, threshold=0, **STREAMED)
    assert train_mixture(resident, experts) == train_mixture(moved, experts)
    assert differing(resident.master_state_dict(), moved.master_state_dict()) == []


def test_the_next_forward_is_fetched_ahead_when_a_step_ends(
    start: Callable[..., Any], micro_batches: Any
) -> None:
    engine = start(**STREAMED)
    for tokens, targets in micro_batches(4):
        engine.backward(engine(tokens, targets))
        engine.step()
    assert any(group.residency is Residency.FETCHING for group in engine._groups)


def test_a_failed_backward_restarts_its_accumulation(
    start: Callable[..., Any], train: Callable[..., Any], micro_batches: Any
) -> None:
    reference = train(1, **STREAMED)
    engine = start(**STREAMED)
    batches = list(micro_batches(2))
    engine.backward(engine(*batches[1]))
    engine.step()
    loss = torch.ones((), requires_grad=True).square()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        engine.backward(loss)
    for tokens, targets in batches:
        assert engine.global_steps == 0
        engine.backward(engine(tokens, targets))
        engine.step()
    assert engine.global_steps == 1
    masters = engine.master_state_dict()
    assert all(torch.equal(masters[name], reference.masters[name]) for name in masters)


def test_the_clip_factor_is_torchs(
    start: Callable[..., Any], micro_batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(accumulation=1, clip=0.25)
    scales: list[float] = []
    begin = engine.optimizer.begin
    monkeypatch.setattr(engine.optimizer, "begin", lambda scale: (scales.append(scale), begin(scale)))
    for tokens, targets in micro_batches(2):
        engine.backward(engine(tokens, targets))
        engine.step()
        assert scales[-1] == 0.25 / (engine.get_global_grad_norm() + 1e-6)
    assert len(scales) == 2


def test_filling_the_tiers_is_not_counted_to_the_first_step(
    start: Callable[..., Any], micro_batches: Any
) -> None:
    engine = start(**STREAMED)
    for tokens, targets in micro_batches(2):
        engine.backward(engine(tokens, targets))
        engine.step()
    (first,) = engine.snapshot().steps
    read, written = engine.plan.nvme_traffic()
    assert first.written_bytes <= written  # it may all be in flight yet
    assert 0 < first.read_bytes <= read
