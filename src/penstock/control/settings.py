"""`[control]`, `[pipeline.evaluation]`, and the keys of `[pipeline.train]` and `[pipeline.rollout]` that the controller
uses. `PipelineSettings` has the same fields; the state machine of a pipeline takes it as an event and journals it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from penstock.envs.settings import EnvSection
from penstock.records.ids import PipelineName
from penstock.records.section import LOOPBACK, NonNegative, NonNegativeFloat, Positive, Seconds, Section


class LivenessSection(Section):
    """Timeouts for processes that send nothing or make no progress, and for stalls of the run."""

    suspect_after_s: Seconds = 5.0
    """A process without messages for this long is suspected."""
    evict_after_s: Seconds = 15.0
    """A process without messages for this long is evicted, and its leases are issued again."""
    wedged_after_s: Seconds = 600.0
    """A process that makes no progress for this long is evicted too, although its heartbeats arrive. If its replacement
    also makes none, the run fails."""
    startup_grace_s: Seconds = 120.0
    """How long a registered process may take until its first heartbeat, and how long a pipeline may take to lease its
    first sample before it counts as stalled."""
    stall_after_s: Seconds = 60.0
    """A stall (no step, delivery or lease) of this length is reported, with which process waits for which."""
    stall_fail_after_s: Seconds = 900.0
    """A stall of this length fails the run with the same report. Longer than `wedged_after_s`, so that a process that
    hangs is replaced first."""
    exit_without_trainer_s: Seconds | None = None
    """Fail the run if no trainer registers within this time after the last one ended. Off by default: trainers may
    join later."""


class ControlSection(LivenessSection):
    host: str = LOOPBACK
    """Address to listen on. Any address but loopback exposes the run to the network; calls still need the token."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 0
    """Port to listen on; 0: the system chooses a free one."""
    heartbeat_every_s: Seconds = 1.0
    """Interval between two heartbeats of a process."""
    reconnect_s: Seconds = 60.0
    """How long workers and trainers try to reach a lost controller before they fail."""

    @model_validator(mode="after")
    def _silence_outlasts_heartbeats(self) -> ControlSection:
        for key in ("suspect_after_s", "evict_after_s"):
            if getattr(self, key) <= self.heartbeat_every_s:
                raise ValueError(
                    f"{key} = {getattr(self, key):g} is no more than heartbeat_every_s = {self.heartbeat_every_s:g}: "
                    "every process would time out between two heartbeats"
                )
        if self.evict_after_s <= self.suspect_after_s:
            raise ValueError(
                f"evict_after_s = {self.evict_after_s:g} is no more than suspect_after_s = {self.suspect_after_s:g}: "
                "raise evict_after_s or lower suspect_after_s, since a process is suspected before it is evicted"
            )
        return self


class EvaluationSection(Section):
    """Evaluation of versions during training, on held-out prompts; evaluation samples are never trained."""

    every_steps: NonNegative = 0
    """Steps between evaluations; the first and the last version are evaluated too. 0: no evaluation."""
    prompts: Positive = 64
    """Number of prompts, or starting states, of one evaluation; the same ones every time."""
    samples: Positive = 1
    """Samples per prompt; more than one only with a temperature."""
    temperature: NonNegativeFloat = 0.0
    """0: the most likely token or action. Policies of gymnasium environments support only 0 and 1."""
    env: EnvSection | None = None
    """Environment for evaluation. By default that of training: the last `prompts` rows of a dataset are then held out
    from training, and prompts that are generated from a seed use another seed."""
    workers: Positive = 1
    """Number of workers that evaluate at once. Meanwhile they load no new weights; the other workers continue."""
    timeout_s: Seconds = 300.0
    """An evaluation that takes longer is skipped; the reason is logged."""
    save_count: NonNegative = 8
    """Number of prompts of each evaluation whose samples are written to `rollouts/`."""

    @model_validator(mode="after")
    def _samples_differ(self) -> EvaluationSection:
        if self.samples > 1 and not self.temperature:
            raise ValueError("evaluation.samples above 1 would all be equal at temperature 0; set a temperature")
        return self

    @property
    def total_samples(self) -> int:
        """Number of samples of one evaluation."""
        return self.prompts * self.samples


class GroupSection(Section):
    """Keys of `[pipeline.rollout]`."""

    workers: Positive = 1
    """Number of rollout workers. Leases are divided among this number, or among those registered if they are more."""
    group_size: Positive = 8
    """Samples per prompt."""
    max_failures: Positive = 3
    """How often a sample may fail before its prompt is set aside with the error."""
    max_losses: Positive | None = None
    """Number of workers that may die while generating a prompt before it is set aside: the prompt may be the cause. Off
    by default: workers die for other reasons too."""


class StepSection(Section):
    """Keys of `[pipeline.train]`."""

    groups_per_step: Positive = 16
    """Prompts per optimiser step."""
    max_staleness: NonNegative = 2
    """Maximum number of versions between the weights that generated a sample and those that train on it."""
    straggler_wait_s: NonNegativeFloat = 60.0
    """How long a full batch waits for groups that it would outdate and that workers still generate. After that they are
    dropped and generated again. 0: no wait, which drops long samples more often than short ones: training is then
    biased. Longer than a sample may take beyond `max_staleness` steps; the view shows when it is too short."""
    filters: list[str] = []
    """Group filters, for example `zero_signal`, or a function of yours as `package.module:function`."""


class PipelineSettings(LivenessSection, GroupSection, StepSection):
    """Settings of the state machine of one pipeline."""

    name: PipelineName
    steps: int | None = None
    """Number of steps of the run; None: until the prompts run out."""
    epochs: int | None = None
    prompt_limit: int | None = None
    """Number of prompts of the run; None: endless, or `epochs` times the number that the first worker reports."""
    max_filtered_per_step: int | None = None
    """Number of groups that the filter may remove between two batches; by default four batches of them. Further groups
    pass unfiltered, so a filter that rejects everything slows the run but cannot stop it."""
    throttle_report_s: Seconds = 30.0
    evaluation: EvaluationSection = EvaluationSection()

    @property
    def resolution_s(self) -> float:
        """Heartbeats at a shorter interval are not recorded: they would fill the journal and change no decision."""
        return self.suspect_after_s / 4

    @property
    def filtered_per_step_allowed(self) -> int:
        """`max_filtered_per_step`, or its default."""
        return 4 * self.groups_per_step if self.max_filtered_per_step is None else self.max_filtered_per_step

    @property
    def set_aside_in_a_row_allowed(self) -> int:
        """Number of prompts set aside in a row, without a delivery in between, after which the run fails. The prompts
        that one dead worker generated count as one."""
        return max(8, self.groups_per_step)
