"""The user's configuration, a `.toml`, with defaults that train on a laptop.

Every model forbids unknown keys; the docstring under a field is its help text and part of the JSON schema.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from penstock.config.launch import LaunchSection
from penstock.config.metrics import MetricsSection
from penstock.config.pipeline import PipelineSection
from penstock.control.settings import ControlSection
from penstock.errors import ConfigError
from penstock.journal.settings import JournalSection
from penstock.payload.settings import PayloadSection
from penstock.pool.checks import check_shape
from penstock.pool.events import PipelineOpened
from penstock.pool.settings import PoolSection
from penstock.records.ids import PipelineName
from penstock.records.pool import DeviceId, Topology
from penstock.records.section import NonNegative, Positive, Seconds, Section
from penstock.runtime.settings import LagSection


class RunSection(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")] = "run"
    """Prefix of the name of the run directory."""
    dir: Path = Path("runs")
    """Folder of the run directories."""
    seed: int = 0
    """Seed of all random numbers: two runs with one seed begin alike. They do not stay equal, because timing decides
    which samples are generated together and with which weights."""
    max_restarts: NonNegative = 10
    """How often one process may be restarted within `restart_window_s` before the run fails."""
    restart_window_s: Seconds = 3600.0
    """Restarts longer ago are not counted: nodes that are lost now and then do not end a long run."""
    grace_s: Seconds = 10.0
    """How long processes may take for a graceful shutdown before they are killed."""
    log_mb: Positive = 64
    """Size at which the log of a process is emptied. Its last `log_mb` megabytes are kept in `NAME.log.1`, which
    replaces an earlier one. Local launcher only."""
    extra_path: list[Path] = []
    """Directories added to the import path of every process, for your environments and rewards."""

    @field_validator("extra_path")
    @classmethod
    def _absolute(cls, paths: list[Path]) -> list[Path]:
        return [path.resolve() for path in paths]  # a run may be resumed from another directory


class Config(Section):
    """One run: some pipelines on one machine or cluster."""

    run: RunSection = RunSection()
    launch: LaunchSection = LaunchSection()
    control: ControlSection = ControlSection()
    lag: LagSection = LagSection()
    pool: PoolSection = PoolSection()
    payload: PayloadSection = PayloadSection()
    journal: JournalSection = JournalSection()
    metrics: MetricsSection = MetricsSection()
    pipeline: Annotated[list[PipelineSection], Field(min_length=1)]

    @model_validator(mode="after")
    def _names_and_devices(self) -> Config:
        names = [pipeline.name for pipeline in self.pipeline]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"pipeline names must differ, found {', '.join(doubled)} more than once")
        for pipeline in self.pipeline:
            ranks, occupied = pipeline.rollout.ranks, pipeline.rollout.devices_per_worker
            if self.pool.devices and pipeline.engine.processes > 1:
                raise ValueError(
                    f"pipeline {pipeline.name!r}: an engine with tensor_parallel above 1 keeps its devices and cannot "
                    "share a pool; serve it with vLLM there"
                )
            if self.pool.devices and pipeline.engine.devices > occupied:
                raise ValueError(
                    f"the engine of pipeline {pipeline.name!r} needs {pipeline.engine.devices} devices of the pool, "
                    f"but rollout.devices_per_worker is {occupied}"
                )
            if self.pool.devices and ranks > 1 and ranks != occupied:
                raise ValueError(
                    f"a worker of pipeline {pipeline.name!r} with {ranks} ranks occupies {ranks} devices of the pool, "
                    f"but rollout.devices_per_worker is {occupied}"
                )
            if self.pool.devices and pipeline.train_ranks > self.pool.devices:
                raise ValueError(
                    f"pipeline {pipeline.name!r} trains on {pipeline.train_ranks} ranks, one device each, but "
                    f"pool.devices is {self.pool.devices}"
                )
            used = {*pipeline.train_devices, *pipeline.rollout_devices}
            if used and (beyond := sorted(device for device in used if not 0 <= device < self.pool.devices)):
                raise ValueError(
                    f"pipeline {pipeline.name!r} uses devices {beyond}, but pool.devices is {self.pool.devices}"
                )
            if self.pool.devices:
                self._check_bundle(pipeline)
        return self

    def _check_bundle(self, pipeline: PipelineSection) -> None:
        devices = tuple(map(DeviceId, pipeline.rollout_devices or range(self.pool.devices)))
        shape = PipelineOpened(PipelineName(pipeline.name), devices, bundle=pipeline.worker_devices)
        try:
            check_shape(shape, Topology((self.pool.devices,)))
        except ConfigError as error:
            raise ValueError(error.message) from None
