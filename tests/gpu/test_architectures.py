"""Models as people bring them (tests/e2e/architectures.py), on a GPU: the same bits wherever their state lives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import tiering
from tests.e2e.architectures import ARCHITECTURES, batches
from tests.e2e.conftest import COMPUTE, Habit, Trained, settings

from .conftest import DEVICE, FAKE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*is deprecated:FutureWarning"),
]

STEPS = 3
STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "host": {"offload_param": "cpu", "offload_optimizer": "cpu"},
    "nvme, no prefetch": {**STREAMED, "prefetch": 0},
    "nvme, nothing persistent": {**STREAMED, "threshold": 0},
}


def train(nvme: Path, name: str, habit: Habit, **options: Any) -> Trained:
    config = settings(nvme, habit, io={"allow_memory_file_system": True}, **options)
    with tiering.initialize(model=habit.build(name), config=config).engine as engine:
        losses, norms = [], []
        for batch in batches(name, STEPS * habit.accumulation, COMPUTE[habit.precision]):
            loss = engine(**{key: value.to(DEVICE) for key, value in batch.items()}).loss
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
            norms.append(engine.get_global_grad_norm())
        return Trained(
            losses, norms, engine.state_dict(), engine.master_state_dict(), engine.snapshot(), engine
        )


def differing(run: Trained, reference: Trained) -> list[str]:
    """What is not the same on both sides, to the bit."""
    losses = ["losses"] if run.losses != reference.losses else []
    norms = ["norms"] if run.norms != reference.norms else []
    return losses + norms + run.differing(reference)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_placement_gives_the_same_bits(nvme: Path, name: str) -> None:
    checkpointing = "not reentrant" if ARCHITECTURES[name].checkpoints else "no"
    for habit, placements in (
        (Habit("bf16", 1), PLACEMENTS),
        (
            Habit("fp32", 2, checkpointing),
            {"nvme, nothing persistent": PLACEMENTS["nvme, nothing persistent"]},
        ),
    ):
        try:
            reference = train(nvme, name, habit)
        except RuntimeError as error:
            if "does not have a deterministic implementation" not in str(error):
                raise
            pytest.skip(
                f"{name} has no deterministic operations on this device: {str(error).splitlines()[0]}"
            )
        assert len(set(reference.norms)) > 1, "it does not train"
        for place, options in placements.items():
            other = differing(train(nvme, name, habit, **options), reference)
            if other and not FAKE and differing(train(nvme, name, habit), reference):
                pytest.fail(f"{name} does not repeat itself on this device, wherever its state lives")
            assert other == [], f"{name}, {habit}, {place}"
