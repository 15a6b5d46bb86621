"""What a rank says about itself once, when it starts: its configuration, its plan, what it runs on. Frozen records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pydantic import TypeAdapter

from tiering.telemetry.figure import Figure, Label
from tiering.telemetry.snapshot import Integer


@dataclass(frozen=True)
class SettingStatus:
    """One key of the configuration by its dotted path, and its value in effect ("auto" filled in), as JSON has it.

    ``origin``: "file" (given), "auto" (the file left it to us) or "default" (the file says nothing). ``verdict`` is
    what became of it here ("honoured", "mapped", ...), and ``note`` what that means. Secrets never get here.
    """

    key: str
    value: object
    origin: Literal["file", "auto", "default"]
    verdict: str = ""
    note: str = ""


@dataclass(frozen=True)
class ConfigurationStatus:
    """What the run was configured with: the file (empty for a dict), what it comes to, and keys by what became of them.

    ``without_effect`` and ``deprecated`` are dotted keys; ``settings`` has every key, defaults included.
    """

    source: str
    outcome: str
    counts: dict[str, Integer] = field(default_factory=dict)
    without_effect: list[str] = field(default_factory=list)
    deprecated: list[str] = field(default_factory=list)
    settings: list[SettingStatus] = field(default_factory=list)


@dataclass(frozen=True)
class PlannedTier:
    """What the plan puts on one tier of a rank, in bytes, in all and by kind."""

    name: Annotated[Literal["device", "host", "nvme"], Label("tier")]
    budget: Integer
    planned: Integer
    by_kind: Annotated[
        dict[str, Integer],
        Figure(
            "Bytes that the plan puts on the tier, by what they hold.",
            "tiering_plan_tier_bytes",
            by=("kind",),
        ),
    ] = field(default_factory=dict)


_MOVED = Figure(
    "Bytes that a step moves by the plan, by what they hold: read and written over NVMe, sent to other ranks.",
    "tiering_plan_step_bytes",
    by=("kind",),
)


@dataclass(frozen=True)
class PlanStatus:
    """The placement that a rank trains with, and what a steady step moves, in bytes by kind.

    The kinds are those of the tiers.
    ``moved_by_format`` has what a step would read and write with each format of the state, within the same budgets.
    ``host_without_nvme`` is the host budget of a rank with which it would do neither, with ``cache_in_host`` true; None
    where no budget would do, or where nothing moves now.
    """

    tiers: list[PlannedTier] = field(default_factory=list)
    read: Annotated[dict[str, Integer], _MOVED, Label("direction", "read")] = field(default_factory=dict)
    written: Annotated[dict[str, Integer], _MOVED, Label("direction", "write")] = field(default_factory=dict)
    sent: Annotated[dict[str, Integer], _MOVED, Label("direction", "send")] = field(default_factory=dict)
    groups: Integer = 0
    parameters: Integer = 0  # elements of the model, those of all ranks
    micro_batches: Integer = 1  # forward and backward passes per step
    state_format: str = ""
    moved_by_format: dict[str, Integer] = field(default_factory=dict)
    host_without_nvme: Integer | None = None


@dataclass(frozen=True)
class Description:
    """Everything about a rank that does not change while it runs. ``versions`` maps a package to its version."""

    device: str = ""  # "cpu", or "cuda:0" and the name of the GPU
    versions: dict[str, str] = field(default_factory=dict)
    configuration: ConfigurationStatus | None = None
    plan: PlanStatus | None = None

    def to_json(self) -> str:
        """The description as JSON text."""
        return _DESCRIPTION.dump_json(self).decode()

    def fitted(self, nbytes: int) -> str:
        """As JSON text of at most ``nbytes``, if need be without some of the settings.

        Notes of defaults are left out first, then defaults, then all settings, then all of the configuration.
        """
        text = self.to_json()
        for smaller in self._smaller():
            if len(text.encode()) <= nbytes:
                break
            text = smaller.to_json()
        return text

    def _smaller(self) -> Iterator[Description]:
        if self.configuration is None:
            return
        settings = self.configuration.settings
        for kept in (
            [replace(one, note="") if one.origin == "default" else one for one in settings],
            [one for one in settings if one.origin != "default"],
            [],
        ):
            yield replace(self, configuration=replace(self.configuration, settings=kept))
        yield replace(self, configuration=None)

    @classmethod
    def from_json(cls, text: str | bytes) -> Description:
        """Inverse of ``to_json``; fields this version does not know are dropped. Raises ValueError."""
        return _DESCRIPTION.validate_json(text)


_DESCRIPTION = TypeAdapter(Description)
