"""How large and how often: the real sizes, and tiny ones that prove nothing but that everything runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from frame.reference_model import Model

from . import saved

MIB = 1 << 20
TIMES_THE_BUDGET = 8


@dataclass(frozen=True, slots=True)
class Scale:
    """``rounds`` of one step are kept after a dropped first one. Budgets in bytes, ``host`` beside activations.

    ``small`` is the model whose bits are compared after ``steps``.
    """

    model: Model
    device: int
    host: int
    rounds: int
    small: Model
    small_budget: int
    steps: int
    fio_file: int  # bytes
    fio_seconds: float

    @property
    def budget(self) -> int:
        """Of activations in host memory: an eighth of them."""
        return sum(saved.storages(self.model)) // TIMES_THE_BUDGET // MIB * MIB


FULL = Scale(
    model=Model(width=512, layers=12, sequence=512, batch=4),
    device=64 * MIB,
    host=768 * MIB,
    rounds=4,
    small=Model(width=128, layers=2, sequence=32, batch=128),
    small_budget=8 * MIB,
    steps=5,
    fio_file=1 << 30,
    fio_seconds=2.0,
)

QUICK = replace(
    FULL,
    model=Model(width=128, layers=4, sequence=32, batch=128),
    rounds=1,
    fio_file=32 << 20,
    fio_seconds=0.2,
)
