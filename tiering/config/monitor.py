"""DeepSpeed's monitor sections, with its names and defaults: where a run writes figures in addition to telemetry."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictBool, StringConstraints

from .fields import Section

Text = Annotated[str, StringConstraints(strict=True)]


class TensorBoardConfig(Section):
    """TensorBoard event files."""

    enabled: StrictBool = Field(default=False, description="Write TensorBoard event files.")
    output_path: Text = Field(default="", description="Directory of all jobs; empty: the current directory.")
    job_name: Text = Field(default="DeepSpeedJobName", description="Directory of this job in output_path.")


class WandbConfig(Section):
    """A Weights & Biases run."""

    enabled: StrictBool = Field(default=False, description="Log to Weights & Biases.")
    group: Text | None = Field(default=None, description="Group of the run.")
    team: Text | None = Field(default=None, description="Entity that the run belongs to.")
    project: Text = Field(default="deepspeed", description="Project of the run.")


class CsvMonitorConfig(Section):
    """One CSV file for each figure."""

    enabled: StrictBool = Field(default=False, description="Write CSV files.")
    output_path: Text = Field(default="", description="Directory of all jobs; empty: the current directory.")
    job_name: Text = Field(default="DeepSpeedJobName", description="Directory of this job in output_path.")


class MonitorConfig(Section):
    """The monitors that write a run's figures."""

    tensorboard: TensorBoardConfig = Field(
        default=TensorBoardConfig(), description="TensorBoard event files."
    )
    wandb: WandbConfig = Field(default=WandbConfig(), description="Weights & Biases.")
    csv_monitor: CsvMonitorConfig = Field(default=CsvMonitorConfig(), description="CSV files.")
