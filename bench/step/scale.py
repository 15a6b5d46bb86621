"""How large and how often: the real sizes, and tiny ones that prove nothing but that everything runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from frame.reference_model import Model


@dataclass(frozen=True, slots=True)
class Scale:
    """``rounds`` are kept after a dropped first one, of ``steps`` each (``peer_steps`` for DeepSpeed)."""

    model: Model
    long_model: Model  # of a micro-batch that computes about as long as its state takes over NVMe
    rounds: int
    steps: int
    peer_steps: int
    starts: int  # fresh processes per side
    small_host: str  # the two host budgets of the NVMe case
    large_host: str
    device: str
    curve: tuple[str, ...]  # host budgets
    curve_rounds: int
    depths: tuple[int, int]
    depth_width: int
    overhead_width: int  # so small that arithmetic is next to nothing
    overhead_steps: int
    fio_file: int  # bytes
    fio_seconds: float


FULL = Scale(
    model=Model(width=1024, layers=24),
    long_model=Model(width=1024, layers=8, sequence=512),
    rounds=7,
    steps=3,
    peer_steps=2,
    starts=2,
    small_host="1GiB",
    large_host="3GiB",
    device="128MiB",
    curve=("0.75GiB", "1GiB", "1.5GiB", "2GiB", "3GiB", "4GiB", "6GiB"),
    curve_rounds=3,
    depths=(12, 96),
    depth_width=512,
    overhead_width=64,
    overhead_steps=12,
    fio_file=4 << 30,
    fio_seconds=2.0,
)

QUICK = replace(
    FULL,
    model=Model(width=256, layers=3),
    long_model=Model(width=256, layers=3, sequence=64),
    rounds=1,
    steps=2,
    starts=1,
    small_host="20MiB",
    large_host="30MiB",
    device="8MiB",
    curve=("20MiB", "30MiB"),
    curve_rounds=1,
    depths=(2, 4),
    depth_width=256,
    overhead_steps=2,
    fio_file=32 << 20,
    fio_seconds=0.2,
)
