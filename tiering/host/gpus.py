"""Peak rates of GPUs by name, from NVIDIA's data sheets."""

from __future__ import annotations

PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165.2e12,
    "V100": 125e12,
}
"""Dense operations per second in a 16-bit dtype with fp32 sums, by a part of the name that the driver reports.

The first part that a name contains counts. The H100 without a further name is the one on SXM.
"""


def peak_flops(name: str, dtype: str) -> float | None:
    """The dense operations per second in ``dtype`` of a whole GPU that the driver calls ``name``; None if unknown."""
    has_matrix_units = dtype == "fp16" or (dtype == "bf16" and "V100" not in name)
    if not has_matrix_units or "MIG" in name:
        return None
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
