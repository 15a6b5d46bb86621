"""The rates with which `tiering plan` estimates the time of a step, from its options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiering.config.training import IoConfig
    from tiering.placement.workload import Workload
    from tiering.planning.measure import Measurement
    from tiering.planning.profiles import Profile
    from tiering.planning.rates import Rates
    from tiering.planning.setting import Setting


def rates_of(
    options: argparse.Namespace, profile: Profile | None, setting: Setting, io: IoConfig
) -> Callable[[Workload], Rates]:
    """A function that returns the rates for a workload.

    In increasing precedence, a rate comes from the profile, from the file of ``--rates``, from a measurement, and from
    its own option.
    """
    from tiering.planning.rates import Rates

    from_file = Rates.load(options.rates) if options.rates is not None else Rates()
    from_options = Rates(**{field.name: getattr(options, field.name) for field in fields(Rates)})

    def rates_for(load: Workload) -> Rates:
        rates = profile.rates(load, nodes=options.nodes) if profile is not None else Rates()
        rates = rates.updated(from_file)
        if options.measure:
            import tiering

            cache = RateCache(measure_again=options.measure_again)
            measured = tiering.measure_rates(
                *options.measure,
                workload=load,
                on_gpu=setting.gpu_memory is not None,
                tokens=setting.tokens,
                io=io,
                take=cache.rates,
            )
            cache.print_summary()
            if options.save_rates is not None:
                measured.save(options.save_rates)
            rates = rates.updated(measured)
        return rates.updated(from_options)

    return rates_for


class RateCache:
    """Measured rates: those of the last 7 days from the user's cache, unless ``measure_again``, and new ones."""

    def __init__(self, *, measure_again: bool) -> None:
        from tiering.planning.saved_rates import SavedRates

        self._saved = SavedRates.of_user()
        self._measure_again = measure_again
        # Name and time of each measurement that came from the cache.
        self._reused: list[str] = []

    def rates(self, part: Measurement) -> Rates:
        """The rates of ``part``, measured and saved unless the cache has them."""
        from tiering.planning import saved_rates
        from tiering.planning.others import remark

        record = None if self._measure_again else self._saved.find(part)
        if record is not None:
            load = f" ({remark(record.others)})" if remark(record.others) else ""
            self._reused.append(f"{part.name} of {record.measured.astimezone():%Y-%m-%d %H:%M}{load}")
            return record.rates
        print(f"measuring: {part.name}", file=sys.stderr, flush=True)
        record = saved_rates.measured(part)
        if remark(record.others):
            print(f"{part.name}: measured {remark(record.others)}", file=sys.stderr)
        self._saved.save(part, record)
        return record.rates

    def print_summary(self) -> None:
        """Print the times of the reused measurements."""
        if self._reused:
            print(
                f"reused measurements: {', '.join(self._reused)}; --measure-again repeats them",
                file=sys.stderr,
            )
