"""How large and how often: the real sizes, and tiny ones that prove nothing but that everything runs."""

from __future__ import annotations

from dataclasses import dataclass

from frame.reference_model import Model


@dataclass(frozen=True, slots=True)
class Scale:
    """``rounds`` are kept after a dropped first one, of ``steps`` each. ``small`` is trained where only bytes count."""

    model: Model
    small: Model
    worlds: tuple[int, ...]  # numbers of ranks there
    rounds: int
    steps: int
    traced: int  # steps whose trace is looked at


FULL = Scale(
    model=Model(width=512, layers=12, sequence=64, batch=4),
    small=Model(width=192, layers=3, sequence=16, batch=1),
    worlds=(2, 4),
    rounds=7,
    steps=3,
    traced=5,
)

QUICK = Scale(
    model=Model(width=64, layers=2, sequence=8, batch=1),
    small=Model(width=64, layers=2, sequence=8, batch=1),
    worlds=(2,),
    rounds=2,
    steps=2,
    traced=1,
)
