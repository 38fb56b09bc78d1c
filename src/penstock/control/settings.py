"""`[control]`, `[pipeline.evaluation]`, and the keys of `[pipeline.train]` and `[pipeline.rollout]` that the controller
decides by. Its machine is given the same fields, as `PipelineSettings`, and journals them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from penstock.envs.settings import EnvSection
from penstock.records.ids import PipelineName
from penstock.records.section import LOOPBACK, NonNegative, NonNegativeFloat, Positive, Seconds, Section


class LivenessSection(Section):
    """When silence and standstill are reported, and when they are the end."""

    suspect_after_s: Seconds = 5.0
    """Silence after which a process is suspected."""
    evict_after_s: Seconds = 15.0
    """Silence after which a process is evicted and its leases are issued again."""
    wedged_after_s: Seconds = 600.0
    """No progress for this long, though heartbeats arrive, counts as silence too. If the process that takes its place
    hangs as well, the run fails."""
    startup_grace_s: Seconds = 120.0
    """How long the first processes may take to register."""
    stall_after_s: Seconds = 60.0
    """No step, delivery or lease for this long is reported, with who waits for whom."""
    stall_fail_after_s: Seconds = 900.0
    """And after this long the run fails with that sentence. Longer than `wedged_after_s`: a process that hangs is
    replaced before."""
    exit_without_trainer_s: Seconds | None = None
    """Fail when a pipeline has had no trainer for this long. Off by default, since trainers may join later."""


class ControlSection(LivenessSection):
    host: str = LOOPBACK
    """Address to listen on. Anything but loopback exposes the run to the network; the token still guards it."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 0
    """0 lets the system choose a free port."""
    heartbeat_every_s: Seconds = 1.0
    """Between two heartbeats of a process."""
    reconnect_s: Seconds = 60.0
    """How long workers and trainers look for a lost controller before they give up."""

    @model_validator(mode="after")
    def _silence_outlasts_heartbeats(self) -> ControlSection:
        for key in ("suspect_after_s", "evict_after_s"):
            if getattr(self, key) <= self.heartbeat_every_s:
                raise ValueError(
                    f"{key} = {getattr(self, key):g} is no more than heartbeat_every_s = {self.heartbeat_every_s:g}: "
                    "between two heartbeats every process would count as silent"
                )
        return self


class EvaluationSection(Section):
    """Measuring versions while training goes on: on prompts that are not trained, never trained themselves."""

    every_steps: NonNegative = 0
    """Steps between evaluations; the first and the last version are evaluated too. 0 evaluates none."""
    prompts: Positive = 64
    """Prompts, or starting states, of one evaluation: the same ones every time."""
    samples: Positive = 1
    """Per prompt; more than one only with a temperature."""
    temperature: NonNegativeFloat = 0.0
    """0 takes the most likely token or action; policies of gymnasium environments know only 0 and 1."""
    env: EnvSection | None = None
    """Another environment than the one trained on. Without one, the last `prompts` rows of a dataset are kept out of
    training; prompts that are made from a seed are made from another one."""
    workers: Positive = 1
    """Workers that evaluate at once. Meanwhile they take no new weights; the others go on as ever."""
    timeout_s: Seconds = 300.0
    """An evaluation that takes longer is skipped, and said to be."""
    save_count: NonNegative = 8
    """Prompts of each whose samples are written to `rollouts/` for reading."""

    @model_validator(mode="after")
    def _samples_differ(self) -> EvaluationSection:
        if self.samples > 1 and not self.temperature:
            raise ValueError("evaluation.samples above 1 would all be alike at temperature 0; set a temperature")
        return self

    @property
    def total_samples(self) -> int:
        """Of one evaluation."""
        return self.prompts * self.samples


class GroupSection(Section):
    """Of `[pipeline.rollout]`."""

    workers: Positive = 1
    """Processes that generate samples. Leases are divided among this number from the start, and among more if more
    register."""
    group_size: Positive = 8
    """Samples per prompt."""
    max_failures: Positive = 3
    """How often a sample is tried before its prompt is set aside with the error."""
    max_losses: Positive | None = None
    """Deaths of its workers after which a prompt is set aside too: it may be what kills them. Off by default: workers
    die for other reasons."""


class StepSection(Section):
    """Of `[pipeline.train]`."""

    groups_per_step: Positive = 16
    """Prompts per optimiser step."""
    max_staleness: NonNegative = 2
    """The most versions between the weights that generated a sample and those that train on it."""
    straggler_wait_s: NonNegativeFloat = 0.0
    """How long a full batch waits for groups that would be outdated without it. 0 never waits: they are generated
    again, which is fastest and favours short samples. In the lines of steps, a `dropped_length_mean` above
    `completion_length_mean` shows by how much; then wait, or raise `max_staleness`."""
    filters: list[str] = []
    """Group filters, for example `zero_signal`, or your own as `package.module:function`."""


class PipelineSettings(LivenessSection, GroupSection, StepSection):
    """All that the machine of one pipeline decides by."""

    name: PipelineName
    steps: int | None = None
    """Length of the run; None: until the prompts run out."""
    epochs: int | None = None
    prompt_limit: int | None = None
    """Prompts in the whole run; None: endless, or `epochs` times what the first worker reports."""
    max_filtered_per_step: int | None = None
    """Groups the filter may take away between two batches, by default four batches' worth. Then groups pass anyway,
    so that a filter that rejects everything slows the run down but cannot stop it."""
    throttle_report_s: Seconds = 30.0
    evaluation: EvaluationSection = EvaluationSection()

    @property
    def resolution_s(self) -> float:
        """Heartbeats closer together than this are not recorded: they would fill the journal and decide nothing."""
        return self.suspect_after_s / 4

    @property
    def filtered_per_step_allowed(self) -> int:
        """`max_filtered_per_step`, or what follows from the size of a batch."""
        return 4 * self.groups_per_step if self.max_filtered_per_step is None else self.max_filtered_per_step

    @property
    def set_aside_in_a_row_allowed(self) -> int:
        """Prompts set aside in a row, none delivered in between, after which the environment counts as broken."""
        return max(8, self.groups_per_step)
