"""Constants and enumerations of DeepSpeed that scripts compare with."""

from __future__ import annotations

import os
from datetime import timedelta
from enum import IntEnum, StrEnum

from tiering._version import __version__
from tiering.launching.lines import ENVIRONMENT_FILE
from zero3.deepspeed.distributed import PORT

version = __version__
DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ENVIRONMENT_FILE)
TORCH_DISTRIBUTED_DEFAULT_PORT = PORT
default_pg_timeout = timedelta(minutes=int(os.environ.get("DEEPSPEED_TIMEOUT", "10")))

LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]


class OffloadDeviceEnum(StrEnum):
    """The device of an offload section; equal to its name."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class ZeroStageEnum(IntEnum):
    """The ZeRO stage; equal to its number."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3
