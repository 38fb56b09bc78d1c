"""The user's configuration: what a `.toml` may say, with defaults that train on a laptop.

Every model forbids unknown keys; the docstring under a field is its help text and ends up in the JSON schema.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from penstock.config.launch import LaunchSection
from penstock.config.metrics import MetricsSection
from penstock.config.pipeline import PipelineSection
from penstock.config.section import NonNegative, NonNegativeFloat, Positive, Seconds, Section


class RunSection(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")] = "run"
    """Names the run directory."""
    dir: Path = Path("runs")
    """Where run directories are made."""
    seed: int = 0
    """Everything random in the run follows from this."""
    max_restarts: NonNegative = 10
    """How often one process may be restarted before the run fails."""
    grace_s: Seconds = 10.0
    """How long processes may take to leave in good order before they are killed."""
    extra_path: list[Path] = []
    """Directories added to every process's import path, for your own environments and rewards."""

    @field_validator("extra_path")
    @classmethod
    def _absolute(cls, paths: list[Path]) -> list[Path]:
        return [path.resolve() for path in paths]  # a run may be resumed from another directory


class ControlSection(Section):
    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback exposes the run to the network; the token still guards it."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 0
    """0 lets the system choose a free port."""
    heartbeat_every_s: Seconds = 1.0
    """Between two signs of life of a process."""
    suspect_after_s: Seconds = 5.0
    """Silence after which a process is suspected."""
    reap_after_s: Seconds = 15.0
    """Silence after which a process is given up and its leases are issued again."""
    wedged_after_s: Seconds = 600.0
    """No progress for so long, though heartbeats arrive, counts as silence too."""
    startup_grace_s: Seconds = 120.0
    """How long the first processes may take to register."""
    stall_after_s: Seconds = 60.0
    """No step, delivery or lease for so long is reported, with who waits for whom."""
    stall_fail_after_s: Seconds = 600.0
    """And after so long the run fails with that sentence."""
    exit_without_trainer_s: Seconds | None = None
    """Fail when a pipeline has had no trainer for so long. Off by default, since trainers may join later."""
    reconnect_s: Seconds = 60.0
    """How long workers and trainers look for a lost controller before they give up."""

    @model_validator(mode="after")
    def _hearts_beat_in_time(self) -> ControlSection:
        for key in ("suspect_after_s", "reap_after_s"):
            if getattr(self, key) <= self.heartbeat_every_s:
                raise ValueError(
                    f"{key} = {getattr(self, key):g} is no more than heartbeat_every_s = {self.heartbeat_every_s:g}: "
                    "between two heartbeats every process would count as silent"
                )
        return self


class LagSection(Section):
    """How every process watches its own event loop."""

    period_s: Seconds = 0.1
    """Between two looks at how late the loop is."""
    window: Positive = 600
    """The percentiles are over so many looks."""
    stall_s: Seconds = 0.5
    """A loop blocked for so long is reported while it blocks, with the stack that blocks it."""
    warn_p99_s: Seconds = 0.1
    """One line of warning when one look in a hundred finds the loop so late."""
    warn_every_s: Seconds = 60.0
    """Between two such lines."""


class PoolSection(Section):
    devices: NonNegative = 0
    """Devices shared by all pipelines: CPU slots, or GPUs where there are any. 0 gives every process its own."""
    payback: NonNegativeFloat = 13.5
    """A worker is woken beyond its pipeline's equal part only for so many times the work that is lost while it wakes.
    Lower makes better use of the devices, higher moves less."""


class PayloadSection(Section):
    carrier: Literal["auto", "shm", "tcp", "ucxx"] = "auto"
    """How samples reach the trainer: `auto` maps shared memory on the same host and uses TCP otherwise."""
    host: str = "127.0.0.1"
    """Address to serve payloads on. Anything but loopback exposes them to the network; the token still guards them."""
    ports: Positive = 2
    """TCP and UCXX: ports of one worker; if one breaks, another is asked."""


class JournalSection(Section):
    snapshot_every_events: Positive = 20_000
    """A restarted controller replays no more than about so many events."""


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
            if self.pool.devices and ranks > 1 and ranks != occupied:
                raise ValueError(
                    f"a worker of pipeline {pipeline.name!r} with {ranks} ranks occupies {ranks} devices of the pool, "
                    f"but rollout.devices_per_worker is {occupied}"
                )
            used = {*pipeline.train_devices, *pipeline.rollout_devices}
            if used and (beyond := sorted(device for device in used if not 0 <= device < self.pool.devices)):
                raise ValueError(
                    f"pipeline {pipeline.name!r} uses devices {beyond}, but pool.devices is {self.pool.devices}"
                )
        return self
