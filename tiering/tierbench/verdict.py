"""The training estimate: the time of an optimizer step on these paths, and the configuration for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiering.planning.decoder import decoder
from tiering.planning.forecast import SECONDS_PER_DAY, disk_seconds
from tiering.planning.rates import Rates
from tiering.planning.setting import Setting, usual_config, with_changes
from tiering.planning.sizing import load_of
from tiering.tierbench.result import Row, Settings, StepVerdict, Sustained

BALANCED_SHARE = 0.05  # if the times of reads and writes differ by no more, both bound the step


def rates_of(rows: Sequence[Row], sustained: Sustained | None = None, *, rwmixread: int = 50) -> Rates:
    """The rates of sequential intervals. For writes, a drive's sustained rate counts, not the rate of its cache.

    The mixed rate is the one of equally many reads and writes; with another ``rwmixread`` it is None.
    """
    by_kind = {row.rw: row.rate for row in rows if row.bytes}
    write, mixed = by_kind.get("write"), by_kind.get("rw") if rwmixread == 50 else None
    if sustained is not None:
        write = sustained.sustained or None
        mixed = None if mixed is None or write is None else min(mixed, 2 * write)  # half of it is writes
    return Rates(nvme_read=by_kind.get("read"), nvme_write=write, nvme_mixed=mixed)


def verdict(params: int, rates: Rates, *, state: str = "fp32") -> StepVerdict | None:
    """An optimizer step of a decoder of ``params`` parameters, with all 16-bit parameters and state on NVMe.

    None if the rate of reads or of writes is unknown. The time excludes kernels, gradients and the parameters that
    forward and backward read; the bytes written per day do count the time of the latter. Raises ConfigError for a
    size that no decoder has.
    """
    if rates.nvme_read is None or rates.nvme_write is None:
        return None
    shape = decoder(params)
    config = with_changes(usual_config(Path("/")), tiers={"cache_in_host": False, "state": state})
    load = load_of(shape, config, Setting())
    state_bytes = sum(map(load.state_bytes, load.groups))
    fetched = sum(2 * load.micro_batches * group.uses * load.home_bytes(group) for group in load.groups)
    moved = [load.param_traffic(group) for group in load.groups]
    read = state_bytes + sum(reads for reads, _ in moved) - fetched
    write = state_bytes + sum(writes for _, writes in moved)
    seconds = disk_seconds(read, write, rates)
    reading, writing = read / rates.nvme_read, write / rates.nvme_write
    is_balanced = abs(reading - writing) <= BALANCED_SHARE * max(reading, writing)
    return StepVerdict(
        params=shape.params,
        state=load.state_format,
        read_bytes=read,
        write_bytes=write,
        seconds=seconds,
        bound="both" if is_balanced else "reads" if reading > writing else "writes",
        written_per_day=write * SECONDS_PER_DAY / (seconds + fetched / rates.nvme_read),
    )


def config_block(directories: Sequence[Path], settings: Settings, *, state: str = "fp32") -> dict[str, Any]:
    """The configuration for state in ``directories``, in the verdict's format and with the measured I/O settings."""
    paths = [str(directory) for directory in directories]
    offload = {"device": "nvme", "nvme_path": paths[0] if len(paths) == 1 else paths}
    tiering: dict[str, Any] = {"io": io_block(settings)}
    if state != "fp32":
        tiering["state"] = state
    if settings.verify:
        tiering["verify"] = True
    return {
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": dict(offload)},
        "tiering": tiering,
    }


def io_block(settings: Settings) -> dict[str, Any]:
    """``tiering.io`` as requested: "auto" stays, because it also selects an engine that works on other machines."""
    return {
        "engine": settings.ioengine,
        "block_size": _size_text(settings.bs),
        "queue_depth": settings.iodepth,
        "registered": settings.registered,
    }


def _size_text(nbytes: int) -> str | int:
    """``1MiB`` if the size is a whole number of a unit, else the number of bytes."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes % unit == 0:
            return f"{nbytes // unit}{name}"
    return nbytes
