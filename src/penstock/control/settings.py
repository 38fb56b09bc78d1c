"""What the control machine must be told: `[control]`, `[pipeline.evaluation]`, and what of a pipeline's other tables it
decides by. Defaults stand in the tables alone."""

from __future__ import annotations

from typing import Annotated

import msgspec
from pydantic import Field, model_validator

from penstock.envs.settings import EnvSection
from penstock.records.ids import PipelineName
from penstock.records.section import NonNegative, NonNegativeFloat, Positive, Seconds, Section


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
    def _silence_outlasts_heartbeats(self) -> ControlSection:
        for key in ("suspect_after_s", "reap_after_s"):
            if getattr(self, key) <= self.heartbeat_every_s:
                raise ValueError(
                    f"{key} = {getattr(self, key):g} is no more than heartbeat_every_s = {self.heartbeat_every_s:g}: "
                    "between two heartbeats every process would count as silent"
                )
        return self


class EvaluationSection(Section):
    """Measuring versions while training goes on: on prompts that are not trained, never trained themselves."""

    every_steps: NonNegative = 0
    """Evaluate the first version, every so many after it, and the last; 0 evaluates none."""
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


_CONTROL, _EVALUATION = ControlSection(), EvaluationSection()


class EvaluationSettings(msgspec.Struct, frozen=True, kw_only=True):
    every: int
    """Versions between two points."""
    prompts: int
    samples: int = _EVALUATION.samples
    """Per prompt."""
    workers: int = _EVALUATION.workers
    """That evaluate at once; the others go on generating for training."""
    timeout_s: float = _EVALUATION.timeout_s
    """What a point may take once it is its turn."""
    max_failures: int = 3
    """A sample that fails so often is left out of the result, and counted."""

    @property
    def cells(self) -> int:
        return self.prompts * self.samples


class PipelineSettings(msgspec.Struct, frozen=True, kw_only=True):
    name: PipelineName
    steps: int | None = None
    """Length of the run; None: until the prompts run out."""
    groups_per_step: int
    group_size: int
    workers: int = 1
    """That the run should have. Leases are divided among so many from the start, and among more if more register."""
    max_staleness: int = 1
    prompt_limit: int | None = None
    """Prompts in the whole run; None: endless, or `epochs` times what the first worker reports."""
    epochs: int | None = None
    straggler_wait_s: float = 0.0
    """How long a full batch waits for groups that would be outdated without it: none of their work is wasted then, and
    long samples are not weeded out. Past this, the batch leaves without them."""
    max_failures: int = 3
    """A prompt that fails this often is set aside."""
    max_losses: int | None = None
    """And so is a prompt during whose generation this many workers died: it may be what kills them. Off by default,
    since a storm of other deaths could then cost an innocent prompt."""
    max_filtered_per_step: int | None = None
    """Groups the filter may take away between two batches, by default four batches' worth; then groups pass anyway,
    so that a filter that dislikes everything slows the run down but cannot stop it."""
    suspect_after_s: float = _CONTROL.suspect_after_s
    reap_after_s: float = _CONTROL.reap_after_s
    wedged_after_s: float = _CONTROL.wedged_after_s
    startup_grace_s: float = _CONTROL.startup_grace_s
    stall_after_s: float = _CONTROL.stall_after_s
    stall_fail_after_s: float | None = _CONTROL.stall_fail_after_s
    exit_without_trainer_s: float | None = _CONTROL.exit_without_trainer_s
    throttle_report_s: float = 30.0
    evaluation: EvaluationSettings | None = None
    """None: versions are never evaluated."""
    filters: tuple[str, ...] = ()
    """Names of what the group filter is made of: it decided what was filtered, so a replay needs the same."""

    @property
    def resolution_s(self) -> float:
        """Heartbeats closer together than this are not recorded: they would fill the journal and decide nothing."""
        return self.suspect_after_s / 4

    @property
    def set_aside_in_a_row_allowed(self) -> int:
        """So many prompts set aside with nothing delivered in between mean that the environment itself is broken."""
        return max(8, self.groups_per_step)
