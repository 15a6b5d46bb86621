"""How large and how often: the real sizes, and tiny ones that prove nothing but that everything runs."""

from __future__ import annotations

from dataclasses import dataclass

from frame.reference_model import Model


@dataclass(frozen=True, slots=True)
class Scale:
    """``rounds`` are kept after a dropped first one. Steps are those behind which a background save is to be over."""

    model: Model
    rounds: int
    host: str  # budgets of sides that have everything on NVMe: of all ranks together
    device: int  # and of each, in bytes
    steps_on_nvme: int
    steps_in_ram: int


FULL = Scale(
    model=Model(width=1024, layers=24, sequence=32, batch=1),
    rounds=5,
    host="1GiB",
    device=128 << 20,
    steps_on_nvme=4,
    steps_in_ram=20,
)

QUICK = Scale(
    model=Model(width=256, layers=3, sequence=32, batch=1),
    rounds=1,
    host="20MiB",
    device=8 << 20,
    steps_on_nvme=3,
    steps_in_ram=3,
)
