"""What rates mean for training: how long an optimizer step takes on these paths, and the configuration for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiering.planning.forecast import SECONDS_PER_DAY, disk_seconds
from tiering.planning.rates import Rates
from tiering.planning.setting import Setting, usual_config, with_changes
from tiering.planning.sizing import decoder, load_of
from tiering.tierbench.result import Row, Settings, Sustained, Verdict

ALIKE = 0.05  # reads and writes whose times differ by no more bound a step together


def rates_of(rows: Sequence[Row], sustained: Sustained | None = None, *, rwmixread: int = 50) -> Rates:
    """Those of sequential windows. What a drive sustains counts for writes, not what its cache takes.

    The mixed rate is that of as many reads as writes: of windows with another mix there is none.
    """
    by_kind = {row.rw: row.rate for row in rows if row.bytes}
    write, mixed = by_kind.get("write"), by_kind.get("rw") if rwmixread == 50 else None
    if sustained is not None:
        write = sustained.sustained or None
        mixed = None if mixed is None or write is None else min(mixed, 2 * write)  # half of it is writes
    return Rates(nvme_read=by_kind.get("read"), nvme_write=write, nvme_mixed=mixed)


def verdict(params: int, rates: Rates, *, state: str = "fp32") -> Verdict | None:
    """An optimizer step of a decoder of ``params`` parameters, its 16-bit parameters and state all on NVMe.

    None where no rate of reads or writes is known. What a step also waits for (kernels, gradients) is not in it; nor
    are the parameters that forward and backward read, but what is written per day counts their time, too. Raises
    ConfigError for a size that no decoder has.
    """
    if rates.nvme_read is None or rates.nvme_write is None:
        return None
    shape = decoder(params)
    config = with_changes(usual_config(Path("/")), tiers={"cache_in_host": False, "state": state})
    load = load_of(shape, config, Setting())
    kept = sum(map(load.state_bytes, load.groups))
    fetched = sum(2 * load.micro_batches * group.uses * load.home_bytes(group) for group in load.groups)
    moved = [load.param_traffic(group) for group in load.groups]
    read = kept + sum(reads for reads, _ in moved) - fetched
    write = kept + sum(writes for _, writes in moved)
    seconds = disk_seconds(read, write, rates)
    reading, writing = read / rates.nvme_read, write / rates.nvme_write
    alike = abs(reading - writing) <= ALIKE * max(reading, writing)
    return Verdict(
        params=shape.params,
        state=load.state_format,
        read_bytes=read,
        write_bytes=write,
        seconds=seconds,
        bound="both" if alike else "reads" if reading > writing else "writes",
        written_per_day=write * SECONDS_PER_DAY / (seconds + fetched / rates.nvme_read),
    )


def config_block(directories: Sequence[Path], settings: Settings, *, state: str = "fp32") -> dict[str, Any]:
    """What a configuration needs to have its state there, in the format of the verdict, moved as it was measured."""
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
    """``tiering.io``: as it was asked for, since "auto" also finds what works elsewhere."""
    return {
        "engine": settings.ioengine,
        "block_size": _written(settings.bs),
        "queue_depth": settings.iodepth,
        "registered": settings.registered,
    }


def _written(nbytes: int) -> str | int:
    """``1MiB`` where that is the number exactly."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes % unit == 0:
            return f"{nbytes // unit}{name}"
    return nbytes
