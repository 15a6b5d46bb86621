"""The ZeRO-Infinity paper's arithmetic (Rajbhandari et al., arXiv 2104.07857, sections 3 and 4), and its tables.

Of a transformer of ``layers`` blocks of ``hidden`` elements, trained by Adam in mixed precision. Its tables count in
binary units: 25K is 25 x 1024, a TB 2^40 bytes. What is here of them is what the formulas give to the last digit that
is printed, but for one cell (see ``PRINTED_OTHERWISE``).
"""

from __future__ import annotations

from typing import NamedTuple

K = 1024
GB = 1 << 30
TB = 1 << 40
SEQUENCE = 1024
STATE_BYTES = 20
"""Per parameter: in fp16 itself and its gradient, in fp32 master, gradient and two moments."""


def params(layers: int, hidden: int) -> int:
    """Four matrices of hidden x hidden for attention, two of hidden x 4 hidden behind it."""
    return 12 * layers * hidden**2


def model_states(layers: int, hidden: int) -> int:
    return STATE_BYTES * params(layers, hidden)


def model_state_working_memory(hidden: int) -> int:
    """Parameter and gradient of the largest matrix, hidden x 4 hidden, in fp16."""
    return 2 * 2 * hidden * 4 * hidden


def activation_checkpoints(batch: int, sequence: int, hidden: int, layers: int, between: int = 1) -> float:
    """One fp16 input for every ``between`` blocks."""
    return 2 * batch * sequence * hidden * layers / between


def activation_working_memory(batch: int, sequence: int, hidden: int, heads: int, between: int = 1) -> int:
    """What is kept of the blocks between two checkpoints while they go backward."""
    return batch * sequence * between * (16 * hidden + 2 * heads * sequence)


def operations(tokens: int, layers: int, hidden: int) -> int:
    """Of an iteration with checkpoints: a forward, a backward of two, and the forward again."""
    return 2 * 4 * tokens * params(layers, hidden)


def bytes_of_parameters_and_gradients(layers: int, hidden: int) -> int:
    """Parameters are fetched for the forward, for its repetition and for the backward; gradients are stored: fp16."""
    return 2 * 4 * params(layers, hidden)


def bytes_of_optimizer_states(layers: int, hidden: int) -> int:
    """Read once and written once."""
    return 2 * 16 * params(layers, hidden)


def bytes_of_checkpoints(tokens: int, layers: int, hidden: int, between: int = 1) -> float:
    """Stored and fetched."""
    return 2 * activation_checkpoints(1, tokens, hidden, layers, between)


def efficiency(intensity: float, bandwidth: float, peak: float) -> float:
    """Of computing ``intensity`` operations for each byte that has to come first, at peak operations a second."""
    return intensity * bandwidth / (intensity * bandwidth + peak)


class Size(NamedTuple):
    """A row of the table of memory requirements: model states in TB, working memories in GB, checkpoints in TB."""

    trillions: float
    layers: int
    hidden: int
    heads: int
    model_states: float
    activations: float  # TB per node
    checkpoints: float  # TB per node
    state_working: float
    activation_working: float


SIZES = (
    Size(0.10, 80, 10 * K, 128, 1.83, 2.03, 0.05, 1.95, 1.63),
    Size(0.50, 100, 20 * K, 160, 9.16, 3.91, 0.12, 6.25, 2.50),
    Size(1.01, 128, 25 * K, 256, 18.31, 7.13, 0.20, 9.77, 3.56),
    Size(10.05, 195, 64 * K, 512, 182.81, 24.38, 0.76, 64.00, 8.00),
    Size(101.47, 315, 160 * K, 1024, 1845.70, 88.59, 3.08, 400.00, 18.00),
)
PRINTED_OTHERWISE = {(10 * K, "state_working"): 20 * (10 * K) ** 2}
"""16 x hidden^2 would be 1.56 GB. The 1.95 that is printed is 20 x hidden^2; the other four follow the formula."""
GPUS_PER_NODE = 16
SEQUENCES_PER_GPU = 4  # of the activations; the checkpoints are those of 32 sequences per node
CHECKPOINTED_PER_NODE = 32


class Bandwidth(NamedTuple):
    """A row of the table of bandwidths that 512 devices need: peak operations, and bytes per second."""

    peak: float
    slow_memory: float  # per device
    slow_memory_of_all: float
    between_devices: float


DEVICES = 512
BANDWIDTHS = tuple(
    Bandwidth(times * 70e12, times * 3.0e9, times * 1.5e12, times * 70e9) for times in (1, 10, 100)
)
