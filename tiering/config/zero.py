"""The ``zero`` section: what ranks partition, and where parameters and optimizer state may live."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from .fields import Count, Elements, Names, Section, Share, expand_home, whole_number


def _paths(value: object) -> object:
    if value is None:
        return ()
    directories = (value,) if isinstance(value, str | Path) else value
    if not isinstance(directories, list | tuple):
        raise ValueError(f"a directory or a list of directories is needed, not {value!r}")
    if not directories:
        raise ValueError("the list of directories is empty; name one or more, or remove the key")
    if "" in directories:
        raise ValueError("a path is empty; write '.' for the current directory")
    return tuple(expand_home(path) for path in directories)


def _refuse_duplicates(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"directory {str(path)!r} is listed twice; list each directory once")
    return paths


Stage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(whole_number)]
Directories = Annotated[tuple[Path, ...], BeforeValidator(_paths), AfterValidator(_refuse_duplicates)]


class OffloadConfig(Section):
    """Where parameters or optimizer state may be kept, other than on the device."""

    device: Literal["none", "cpu", "nvme"] = Field(
        default="none", description="Slowest tier allowed for this state: none, cpu (host memory) or nvme."
    )
    nvme_path: Directories = Field(
        default=(),
        description="Directory of the swap space for device nvme, or a list of directories to stripe over.",
    )

    @model_validator(mode="after")
    def _check_nvme_path(self) -> Self:
        if self.device == "nvme" and not self.nvme_path:
            raise ValueError("device 'nvme' needs nvme_path, the directory of the swap space")
        return self

    @property
    def swap_directories(self) -> tuple[Path, ...]:
        """The resolved directories of nvme_path; empty unless the device is nvme."""
        return tuple(path.resolve() for path in self.nvme_path) if self.device == "nvme" else ()


class OffloadOptimizerConfig(OffloadConfig):
    """Where the optimizer state may be kept, other than on the device, and how much of it."""

    ratio: Share = Field(default=1.0, description="Fraction of the optimizer state that leaves the device.")


class LeafModulesConfig(Section):
    """Modules whose parameters move together whichever submodules run, for example experts routed per rank."""

    classes: Names = Field(default=(), description="Class names, with or without their Python module.")
    names: Names = Field(default=(), description="Names of modules in the model.")
    name_suffixes: Names = Field(default=(), description="Suffixes of names of modules in the model.")


class ZeroConfig(Section):
    """Partitioning and offload of parameters, gradients and optimizer state."""

    stage: Stage = Field(
        default=0,
        description="Partitioned state: 0 none, 1 optimizer state, 2 also gradients, 3 also parameters.",
    )
    offload_param: OffloadConfig = Field(
        default=OffloadConfig(), description="Home of the compute parameters."
    )
    offload_optimizer: OffloadOptimizerConfig = Field(
        default=OffloadOptimizerConfig(), description="Home of masters and optimizer state."
    )
    sub_group_size: Count = Field(default=10**9, description="Maximum elements of state updated at once.")
    prefetch_elements: Elements = Field(
        default=5 * 10**7,
        description="Maximum elements prefetched, but at least room for the next group; 0: no prefetch.",
    )
    reduce_bucket_elements: Count = Field(
        default=5 * 10**8,
        description="Maximum gradients of a group that ranks exchange at once; the plan takes fewer if it has no room.",
    )
    live_elements: Elements = Field(
        default=0,
        description="Maximum elements of parameters that are fetched to the device at once, as far as modules allow:"
        " blocks with more than half of it are cut, and less is prefetched; 0: no limit but device_budget.",
    )
    granularity_threshold: Elements = Field(
        default=0,
        description="A module with fewer parameters per module in it is never cut into groups; 0: any block may be.",
    )
    persistence_threshold: Elements = Field(
        default=10**5, description="Parameters with fewer elements stay on the device."
    )
    leaf_module: LeafModulesConfig = Field(
        default=LeafModulesConfig(), description="Modules whose parameters move together."
    )

    @model_validator(mode="after")
    def _check_stage_allows_offload(self) -> Self:
        if self.offload_param.device != "none" and self.stage < 3:
            raise ValueError(
                f"stage {self.stage} keeps parameters on the device, so offload_param cannot offload them:"
                " use stage 3, or remove offload_param"
            )
        if self.offload_optimizer.device != "none" and self.stage < 1:
            raise ValueError(
                "stage 0 keeps optimizer state on the device, so offload_optimizer cannot offload it:"
                " use stage 1, 2 or 3, or remove offload_optimizer"
            )
        return self

    @property
    def swap_directories(self) -> tuple[Path, ...]:
        """The swap directories of both offload sections, without duplicates."""
        return tuple(
            dict.fromkeys((*self.offload_param.swap_directories, *self.offload_optimizer.swap_directories))
        )
