"""State formats: split is fp32 to the bit, bf16 moments are those of optim_cpu, and placement changes neither."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optim_cpu
from optim_cpu import kernels
from tests.crossed import crossed
from tests.zero3.plain import (
    PLACEMENTS,
    STREAMED,
    Loop,
    Outcome,
    Tower,
    assert_same_everywhere,
    inputs,
    run_engine,
    update,
)
from tests.zero3.scales import (
    CASES,
    FORMATS,
    LR,
    Case,
    Run,
    Scales,
    assert_same,
    param_groups,
    settings,
    train_engine,
    train_plainly,
    train_rule,
)
from tests.zero3.scales import PLACEMENTS as SCATTERED
from tiering.placement.workload import Tier
from zero3.device import kernels as device_kernels
from zero3.optimizer.tile_stepper import TileStepper

Start = Callable[..., Any]
Differing = Callable[[dict[str, Tensor], dict[str, Tensor]], list[str]]


@pytest.fixture
def run(start: Start) -> Callable[..., Run]:
    """``run(case, precision, accumulation, **config)`` trains Scales, where some is frozen and blocks take turns."""
    return partial(train_rule, start)


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("name", "accumulation"),
    [
        ("AdamW", 1),
        ("AdamW", 2),
        ("Adam", 1),
        ("Lion", 2),
        ("Adagrad", 1),
        ("SGD", 2),
        ("SGD, momentum", 1),
        ("SGD, Nesterov", 2),
    ],
)
def test_split_state_is_fp32_state_to_the_bit_wherever_it_lives(
    name: str, accumulation: int, run: Callable[..., Run], differing: Differing
) -> None:
    fp32 = run(CASES[name], accumulation=accumulation)
    for where, placement in ({"device": {}} | SCATTERED).items():
        split = run(CASES[name], accumulation=accumulation, state="split", **placement)
        assert_same(split, fp32, differing, where)
        assert split.optimizer.steps == fp32.optimizer.steps, where
    assert split.plan is not None and fp32.plan is not None
    assert split.plan.workload.state_itemsize == fp32.plan.workload.state_itemsize - 2


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("name", "accumulation"),
    [
        pytest.param("AdamW", 1, marks=pytest.mark.slow),
        ("AdamW", 2),
        ("Lion", 1),
        ("Adagrad", 2),
        pytest.param("SGD, Nesterov", 1, marks=pytest.mark.slow),
    ],
)
def test_bf16_moments_are_the_same_wherever_they_live(
    name: str, accumulation: int, run: Callable[..., Run], differing: Differing
) -> None:
    """And with a split master besides."""
    reference = run(CASES[name], accumulation=accumulation, state="bf16")
    for where, placement in SCATTERED.items():
        moved = run(CASES[name], accumulation=accumulation, state="split+bf16", **placement)
        assert_same(moved, reference, differing, f"split, {where}")
        if "nvme" in placement.values():
            moved = run(CASES[name], accumulation=accumulation, state="bf16", **placement)
            assert_same(moved, reference, differing, where)
    assert all(torch.equal(value, value.bfloat16().float()) for value in reference.state.values())
    fp32 = run(CASES[name], accumulation=accumulation)
    assert len(differing(reference.state, fp32.state)) == len(fp32.state)


@pytest.mark.parametrize("state", FORMATS[1:])
@pytest.mark.parametrize("name", ["AdamW", "Lion", "SGD"])
def test_tiles_are_stepped_by_torch_operations_to_the_same_bits(
    name: str, state: str, run: Callable[..., Run], differing: Differing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a GPU are; with a square root that is rounded correctly, which a CPU's in torch is not."""
    reference = run(CASES[name], accumulation=2, state=state)
    sqrt, stepped = torch.Tensor.sqrt, []
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda t: sqrt(t.double()).float())
    monkeypatch.setattr(TileStepper, "_tiles_with", lambda self, tile: self._on_device)
    step = device_kernels.step_segments

    def counted(segments: Sequence[device_kernels.Segment], grad_scale: float) -> None:
        stepped.extend(segments)
        step(segments, grad_scale)

    monkeypatch.setattr(device_kernels, "step_segments", counted)
    moved = run(CASES[name], accumulation=2, state=state, sub_group_size=1)
    assert len(stepped) > len(reference.masters)
    assert_same(moved, reference, differing, "torch operations")


def in_model_order(model: nn.Module, options: dict[str, Any]) -> list[dict[str, Any]]:
    """``param_groups`` with one group for each parameter: stochastic rounding counts elements in this order."""
    places = {p: place for place, p in enumerate(model.parameters())}
    single = [{**group, "params": [p]} for group in param_groups(model, options) for p in group["params"]]
    return sorted(single, key=lambda group: places[group["params"][0]])


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("AdamW", "fp32"),
        ("AdamW", "bf16"),
        ("AdamW", "fp16"),
        ("Adam", "bf16"),
        ("Lion", "fp32"),
        ("Adagrad", "bf16"),
        ("SGD, momentum", "fp32"),
        ("SGD, Nesterov", "bf16"),
    ],
)
def test_bf16_moments_are_those_of_a_plain_loop(
    name: str, precision: str, run: Callable[..., Run], differing: Differing
) -> None:
    case = CASES[name]
    engine = run(case, precision, 2, state="bf16", **SCATTERED["all on nvme"])
    plain = train_plainly(
        partial(as_bf16, case), case.options, precision, 2, engine.norms, groups=in_model_order
    )
    plain.state = {name: value.float() for name, value in plain.state.items()}
    assert_same(engine, plain, differing, "plain")


def behind_the_frozen(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The model's first parameter is frozen, and counts."""
    assert next(iter(Scales().named_parameters()))[0] == "frozen"
    return [{"params": [nn.Parameter(torch.zeros_like(Scales().frozen))]}, *groups]


def as_bf16(case: Case, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return case.make([{**group, "state_format": "bf16"} for group in behind_the_frozen(groups)])


def adamw(groups: Any, **options: Any) -> torch.optim.Optimizer:
    return optim_cpu.AdamW(groups, LR, (0.8, 0.9), 1e-6, 0.1, **options)


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    ("state_format", "options"),
    crossed(["bf16", "split+bf16"], [{"stochastic_rounding": False}, {"seed": 5}, {"seed": (1 << 64) - 1}]),
)
def test_an_optimizer_that_is_taken_over_decides_the_format(
    start: Start, state_format: str, options: dict[str, Any], differing: Differing, run: Callable[..., Run]
) -> None:
    def trained(**config: Any) -> Run:
        model = Scales()
        client = adamw(in_model_order(model, {}), state_format=state_format, **options)
        return train_engine(start(model, client=client, rule=None, **settings("bf16", 2), **config), 2)

    reference = trained()
    assert reference.plan is not None
    assert reference.plan.workload.state_itemsize == (6 if state_format == "split+bf16" else 8)
    for placement in SCATTERED.values():
        assert_same(trained(**placement), reference, differing, str(placement))
    assert_same(trained(state=state_format), reference, differing, "named in the configuration, too")
    # Where a plain loop steps float32 masters, split means nothing.
    plain = train_plainly(
        lambda groups: adamw(behind_the_frozen(groups), state_format="bf16", **options),
        {},
        "bf16",
        2,
        reference.norms,
        groups=in_model_order,
    )
    plain.state = {name: value.float() for name, value in plain.state.items()}
    assert_same(reference, plain, differing, "plain")
    by_default = run(CASES["AdamW"], accumulation=2, state=state_format)
    assert differing(reference.masters, by_default.masters), "the options make no difference"


def test_an_optimizer_with_split_state_is_one_with_fp32_state(start: Start, differing: Differing) -> None:
    runs = []
    for state_format in ("fp32", "split"):
        model = Scales()
        client = adamw(param_groups(model, {}), state_format=state_format)
        runs.append(train_engine(start(model, client=client, rule=None, **settings("bf16")), 1))
    assert_same(runs[1], runs[0], differing, "split")
    assert [run.plan.workload.state_itemsize for run in runs if run.plan] == [12, 10]


def test_torchs_optimizers_keep_what_the_configuration_says(start: Start, differing: Differing) -> None:
    runs = []
    for named in (False, True):
        model = Scales()
        client = torch.optim.AdamW(param_groups(model, {}), LR, (0.8, 0.9), 1e-6, 0.1)
        options: dict[str, Any] = {"rule": None, "client": client}
        if named:
            case = CASES["AdamW"]
            groups = param_groups(model, {})
            options = {"rule": case.name, "optimizer": case.options, "model_parameters": groups}
        runs.append(train_engine(start(model, state="split+bf16", **options, **settings("bf16")), 1))
    assert_same(runs[1], runs[0], differing, "named")


def turns(loop: Loop) -> list[float]:
    return [update(loop, x, skip=n % 4) for n, x in enumerate(inputs(6))]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_split_trains_as_a_plain_loop_also_within_the_smallest_budgets(
    start: Start, accumulation: int, differing: Differing
) -> None:
    split = assert_same_everywhere(
        start, Tower, turns, precision="bf16", accumulation=accumulation, state="split"
    )
    fp32 = run_engine(start, Tower, turns, precision="bf16", accumulation=accumulation)
    assert_same_outcome(split, fp32, differing, "fp32")


@pytest.mark.parametrize("state", ["bf16", "split+bf16"])
def test_bf16_moments_within_the_smallest_budgets(start: Start, state: str, differing: Differing) -> None:
    reference = run_engine(start, Tower, turns, precision="bf16", state="bf16")
    for name, placement in ({"device": {}} | PLACEMENTS).items():
        run = run_engine(start, Tower, turns, precision="bf16", state=state, **placement)
        assert_same_outcome(run, reference, differing, name)
    least = run_engine(start, Tower, turns, precision="bf16", state=state, smallest=True, **STREAMED)
    assert_same_outcome(least, reference, differing, "the smallest budgets")


def assert_same_outcome(run: Outcome, expected: Outcome, differing: Differing, where: str) -> None:
    assert run.losses == expected.losses, where
    assert differing(run.masters, expected.masters) == [], where
    assert differing(run.state, expected.state) == [], where


CUTS: dict[str, dict[str, Any]] = {
    "smallest tiles": {**STREAMED, "sub_group_size": 1},
    "part cached": {"offload_param": "nvme", "offload_optimizer": "nvme", "host_budget": "900KiB"},
    "all one group": {**STREAMED, "threshold": 0},
    "io_uring": {**STREAMED, "io": {"engine": "io_uring", "block_size": "64K"}},
    "libaio": {**STREAMED, "io": {"engine": "libaio"}},
    "threads": {**STREAMED, "io": {"engine": "threads", "block_size": "4K", "queue_depth": 3}},
    "verified": {**STREAMED, "verify": True},
}


@pytest.mark.one_of(2)
@pytest.mark.parametrize("state", FORMATS[1:])
def test_tied_weights_in_any_cut_by_any_backend(
    train: Callable[..., Any], state: str, differing: Differing
) -> None:
    """Also in how parameters are grouped: the place that stochastic rounding counts is the model's."""
    reference = train(accumulation=1, state="fp32" if state == "split" else "bf16")
    for name, options in CUTS.items():
        run = train(accumulation=1, state=state, **options)
        assert run.losses == reference.losses, name
        assert differing(run.weights, reference.weights) == [], name
        assert differing(run.masters, reference.masters) == [], name


@pytest.mark.one_of(3)
@pytest.mark.parametrize("state", FORMATS[1:])
def test_kernel_threads_and_instruction_sets_change_no_bit(
    train: Callable[..., Any], state: str, differing: Differing
) -> None:
    streamed = {**STREAMED, "host_budget": "400KiB"}
    reference = train(2, accumulation=1, state=state, **streamed)
    chosen = kernels.instruction_set()
    try:
        for name in kernels.available_instruction_sets():
            kernels.set_instruction_set(name)
            kernels.set_thread_count(3 if name == chosen else 1)
            run = train(2, accumulation=1, state=state, **streamed)
            assert differing(run.masters, reference.masters) == [], name
            assert differing(run.weights, reference.weights) == [], name
    finally:
        kernels.set_instruction_set(chosen)
        kernels.set_thread_count(None)


BYTES = {  # per parameter and step over NVMe: parameters and state there, state alone
    "fp32": (30, 24),
    "split": (28, 20),
    "bf16": (22, 16),
    "split+bf16": (20, 12),
}


@pytest.mark.parametrize("state", FORMATS)
def test_the_plan_moves_as_many_bytes_as_the_design_says(start: Start, state: str) -> None:
    for offloaded, expected in zip((STREAMED, ALONE), BYTES[state], strict=True):
        plan = start(Tower(), accumulation=1, threshold=0, state=state, **offloaded).plan
        trained = sum(group.trainable_numel for group in plan.workload.groups)
        assert Tier.NVME not in plan.grad_tiers
        assert sum(plan.nvme_traffic()) == expected * trained


ALONE = {"offload_optimizer": "nvme", "cache_in_host": False}


@pytest.mark.parametrize(
    ("state", "precision", "nbytes"),
    [
        ("fp32", "bf16", 12),
        ("split", "bf16", 10),
        ("bf16", "bf16", 8),
        ("split+bf16", "bf16", 6),
        ("bf16", "fp32", 4),
        ("bf16", "fp16", 8),
    ],
)
def test_state_takes_as_much_as_its_format(start: Start, state: str, precision: str, nbytes: int) -> None:
    plan = start(Tower(), precision=precision, state=state, **STREAMED).plan
    trained = sum(group.trainable_numel for group in plan.workload.groups)
    assert sum(plan.contents(tier).get("optimizer state", 0) for tier in Tier) == nbytes * trained
