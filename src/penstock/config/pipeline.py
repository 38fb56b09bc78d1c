"""One pipeline of the user's configuration: environment, model, engine, training and devices."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from penstock.batch.advantage import NAMED as ADVANTAGES
from penstock.config.recommended import fill_in
from penstock.control.settings import EvaluationSection
from penstock.engines.registry import Engine
from penstock.engines.settings import LoraSection, MlpModel, Model, TinyModel
from penstock.engines.torch.settings import TorchEngineSection
from penstock.envs.settings import EnvSection
from penstock.records.section import (
    GYMNASIUM_ONLY,
    LANGUAGE_ONLY,
    NonNegative,
    Positive,
    PositiveFloat,
    Section,
    Trained,
    written_for_others,
)
from penstock.rollout.settings import RolloutSection
from penstock.train.losses.tokens import NAMED as LOSSES
from penstock.train.settings import (
    CheckpointSection,
    OptimizerSection,
    PpoLossSection,
    SamplesSection,
    TokenLossSection,
    TrainSection,
)
from penstock.weights.settings import WeightsSection

MOST_RING_SLOTS = 1 << 20
MOST_RING_BYTES = 1 << 40
TOKEN_BYTES = 9
"""Bytes of one token in a payload: its id, its log-probability, and whether it is trained on."""
PROMPT_BYTES = 4096 * TOKEN_BYTES
"""Space in a ring for a sample's prompt and the environment's replies: their length is not in the configuration."""
WORKLOADS_TABLES = ("env.", "rollout.", "engine.", "evaluation.")
"""Tables whose keys a workload of the user may use, whatever is trained."""
WHOLE_MATRICES = ("torch.optim:Adafactor", "torch.optim:Muon")
"""Optimisers whose state has another layout than the parameters."""


class PipelineSection(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
    """Name of the pipeline in the view, in files and in `--set`."""
    steps: Positive
    """Optimiser steps to train."""
    epochs: Positive | None = None
    """Stop after this many passes over a finite environment, if that is before `steps`."""
    weight: PositiveFloat = 1.0
    """Share of the pool, relative to the weights of other pipelines."""
    min_workers: NonNegative = 0
    """Workers that it always has on a shared pool while it has work for them."""
    max_workers: Positive | None = None
    """Workers it may have awake at once; all of `rollout.workers` by default."""
    train_devices: list[int] = []
    """Devices of the pool that it trains on; the first `train.ranks` by default."""
    rollout_devices: list[int] = []
    """Devices of the pool that it may generate on, including training devices of other pipelines; all by default."""
    env: EnvSection
    model: Model
    lora: Annotated[LoraSection | None, LANGUAGE_ONLY] = None
    """`[pipeline.lora]`: train an adapter of the model instead of all its weights."""
    engine: Engine = TorchEngineSection()
    rollout: RolloutSection = RolloutSection()
    train: TrainSection = TrainSection()
    token_loss: Annotated[TokenLossSection, LANGUAGE_ONLY] = TokenLossSection()
    ppo_loss: Annotated[PpoLossSection, GYMNASIUM_ONLY] = PpoLossSection()
    optimizer: OptimizerSection = OptimizerSection()
    weights: WeightsSection = WeightsSection()
    checkpoint: CheckpointSection = CheckpointSection()
    samples: SamplesSection = SamplesSection()
    evaluation: EvaluationSection = EvaluationSection()

    @model_validator(mode="before")
    @classmethod
    def _recommended(cls, table: Any) -> Any:
        return fill_in(table) if isinstance(table, dict) else table

    @property
    def ring_slots(self) -> int:
        """Slots of each worker's ring. One worker may generate all samples that admission allows at a time. A ring
        that is full before the step's batch is complete would block indefinitely."""
        return min(
            MOST_RING_SLOTS, max(self.rollout.ring_slots, 2 * (self.train.max_staleness + 2) * self.step_samples)
        )

    def ring_bytes(self, sample_bytes: int) -> int:
        """Size of each worker's ring for samples of up to `sample_bytes`, for the same reason. Unused space takes no
        memory."""
        under_way = 2 * (self.train.max_staleness + 2) * self.step_samples * (sample_bytes + PROMPT_BYTES)
        return max(self.rollout.ring_mb << 20, min(MOST_RING_BYTES, under_way))

    @property
    def step_samples(self) -> int:
        return self.train.groups_per_step * self.rollout.group_size

    @property
    def sample_bytes(self) -> int:
        """Bytes of a language model's sample with completions of the full length, without its prompt."""
        if self.kind == "gymnasium":
            return 0
        tokens = self.rollout.max_turns * self.rollout.max_new_tokens
        return TOKEN_BYTES * (min(tokens, self.model.max_length) if isinstance(self.model, TinyModel) else tokens)

    def limited_calls(self) -> str:
        """A warning if `max_staleness` allows fewer samples in flight than the workers generate at once, else ""."""
        rollout, train = self.rollout, self.train
        at_once = rollout.batch_samples * rollout.concurrency
        if not isinstance(self.model, MlpModel):
            at_once = min(at_once, self.engine.requests_at_once)
        step = self.step_samples
        allowed, possible = (train.max_staleness + 1) * step, rollout.workers * at_once
        if possible <= allowed:
            return ""
        return (
            f"pipeline {self.name!r}: {rollout.workers} workers could generate {possible} samples at once, but "
            f"train.max_staleness = {train.max_staleness} allows {allowed} in flight, including those in training: "
            f"not all workers will be full. To fill them use fewer, larger steps (train.groups_per_step), or "
            f"max_staleness = {-(-possible // step)}"
        )

    @property
    def train_ranks(self) -> int:
        return self.train.ranks or len(self.train_devices) or 1

    @property
    def worker_devices(self) -> int:
        """Devices of one worker at a time."""
        return max(self.rollout.devices_per_worker, self.rollout.ranks, self.engine.devices)

    @property
    def kind(self) -> Literal["language", "gymnasium"]:
        return "gymnasium" if self.env.name == "gymnasium" else "language"

    @property
    def trained(self) -> Trained:
        return "gymnasium" if isinstance(self.model, MlpModel) else "language"

    @model_validator(mode="after")
    def _model_fits_environment(self) -> PipelineSection:
        if self.rollout.workload is None and (self.kind == "gymnasium") != isinstance(self.model, MlpModel):
            kinds = "mlp" if self.kind == "gymnasium" else "tiny, path or hub"
            raise ValueError(f"environment {self.env.name!r} needs a model of kind {kinds}, found {self.model.kind!r}")
        if self.engine.capabilities.weights == "none":
            raise ValueError(
                f"an engine of kind {self.engine.kind!r} serves weights that training cannot change, so no sample "
                "would be of the policy that is trained; measure it with: penstock eval MODEL --engine kind=..."
            )
        if isinstance(self.model, MlpModel) and not self.engine.capabilities.gymnasium:
            raise ValueError(f"this engine of kind {self.engine.kind!r} serves language models, no gymnasium policies")
        if self.lora is not None and (isinstance(self.model, MlpModel) or not self.engine.capabilities.adapters):
            raise ValueError(
                "lora needs a language model and an engine with adapters: 'vllm', or 'torch' without tensor_parallel"
            )
        self._check_used_keys()
        self._check_group_size()
        self._check_teacher()
        if self.step_samples > MOST_RING_SLOTS:
            raise ValueError(
                f"a step of {self.step_samples} samples does not fit into a ring of {MOST_RING_SLOTS} slots"
            )
        self._check_truncation()
        self._check_ranks()
        self._check_train_ranks()
        self._check_evaluation()
        if self.weights.min_healthy > self.rollout.workers:
            raise ValueError(
                f"weights.min_healthy is {self.weights.min_healthy}, but rollout.workers is {self.rollout.workers}: "
                "lower the first, or raise the second"
            )
        self._check_cache()
        if self.rollout.preparation_processes and self.kind == "gymnasium":
            raise ValueError("rollout.preparation_processes prepare prompts, and gymnasium environments have none")
        if self.env.reward_weights and len(self.env.reward_weights) != len(self.env.rewards):
            raise ValueError(
                f"env.reward_weights has {len(self.env.reward_weights)} entries for {len(self.env.rewards)} rewards"
            )
        return self

    def _check_used_keys(self) -> None:
        own = WORKLOADS_TABLES if self.rollout.workload is not None else ()
        unused = [key for key in written_for_others(self, self.trained) if not key.startswith(own)]
        if not unused:
            return
        policy, instead = {
            "gymnasium": ("a gymnasium policy, which PPO trains", "the keys of its loss are in [pipeline.ppo_loss]"),
            "language": ("a language model", "the keys of its losses are train.loss and [pipeline.token_loss]"),
        }[self.trained]
        raise ValueError(f"{', '.join(unused)}: no effect on {policy}; delete these keys ({instead})")

    def _check_group_size(self) -> None:
        language = not isinstance(self.model, MlpModel)  # an actor-critic policy takes its advantages from its critic
        compared = self.train.loss != "distill" and self.train.advantage in ADVANTAGES
        if language and self.rollout.group_size == 1 and compared:
            raise ValueError(
                f"rollout.group_size = 1 with advantage {self.train.advantage!r}: a sample is compared with the others "
                "of its group, so every advantage would be 0. Use at least 2"
            )

    def _check_teacher(self) -> None:
        train = self.train
        if train.loss == "distill" and train.teacher is None:
            raise ValueError("train.loss = 'distill' needs train.teacher, the directory of a language model")
        unused = isinstance(self.model, MlpModel) or (train.loss in LOSSES and train.loss != "distill")
        if train.teacher is not None and unused:
            raise ValueError(f"train.teacher is not used by train.loss = {train.loss!r}: set loss = 'distill'")

    def _check_truncation(self) -> None:
        """The importance weight of an up-to-date token is the share that truncation left of the distribution."""
        rollout, loss = self.rollout, self.token_loss
        unbounded = rollout.top_k is not None or rollout.min_p > 0
        if loss.importance == "mask" and (unbounded or rollout.top_p < loss.mask_low):
            raise ValueError(
                "with rollout.top_k, top_p or min_p the importance weight of an up-to-date token can be below "
                f"token_loss.mask_low = {loss.mask_low}; importance = 'mask' would drop it, use 'truncate' or 'none'"
            )

    def _check_evaluation(self) -> None:
        section = self.evaluation
        if not section.every_steps:
            return
        if self.rollout.ranks > 1:
            raise ValueError("evaluation.every_steps needs workers of one rank: rollout.ranks must be 1")
        if section.env is not None and (section.env.name == "gymnasium") != (self.kind == "gymnasium"):
            raise ValueError(f"evaluation.env {section.env.name!r} is of another kind than env {self.env.name!r}")
        if self.kind == "gymnasium" and section.temperature not in (0.0, 1.0):
            raise ValueError(f"evaluation.temperature of a gymnasium policy is 0 or 1, found {section.temperature}")

    def _check_cache(self) -> None:
        engine, new_tokens = self.engine, self.rollout.max_new_tokens
        if isinstance(self.model, MlpModel) or not isinstance(engine, TorchEngineSection):
            return
        if engine.cache_tokens <= new_tokens:
            raise ValueError(
                f"engine.cache_tokens is {engine.cache_tokens}, which does not hold a prompt and "
                f"rollout.max_new_tokens = {new_tokens}: raise it"
            )

    def _check_train_ranks(self) -> None:
        ranks = self.train_ranks
        if len(set(self.train_devices)) < len(self.train_devices):
            raise ValueError(f"train_devices = {self.train_devices} names a device twice")
        if self.train_devices and ranks != len(self.train_devices):
            raise ValueError(
                f"train.ranks = {ranks}, but train_devices names {len(self.train_devices)} devices: each rank has one"
            )
        sharded = ranks > 1 or self.train.fsdp
        if self.optimizer.offload and sharded:
            raise ValueError("optimizer.offload is for one rank without train.fsdp; several ranks shard the state")
        if self.optimizer.offload and isinstance(self.model, MlpModel):
            raise ValueError(
                "optimizer.offload is for language models: a gymnasium policy rescales its critic on the device, which "
                "the masters in host memory would undo. Remove optimizer.offload; the policy is small"
            )
        if sharded and self.optimizer.name in WHOLE_MATRICES:
            raise ValueError(
                f"optimizer.name = {self.optimizer.name!r} needs whole matrices, and a rank holds only some rows: "
                "use one rank without train.fsdp, or torch.optim:AdamW"
            )
        if sharded and isinstance(self.model, MlpModel):
            raise ValueError(f"{ranks} ranks train language models only; a gymnasium policy trains on one device")

    def _check_ranks(self) -> None:
        rollout = self.rollout
        if self.engine.processes > 1 and isinstance(self.model, MlpModel):
            raise ValueError("engine.tensor_parallel shards language models: a gymnasium policy has one process")
        if self.engine.processes > 1 and rollout.ranks > 1:
            raise ValueError("engine.tensor_parallel and rollout.ranks cannot both be above 1: use more workers")
        if rollout.ranks == 1:
            return
        if not self.engine.capabilities.ranks:
            raise ValueError(f"engine.kind = {self.engine.kind!r} does not support rollout.ranks above 1: use 'torch'")
        if self.weights.transport == "broadcast":
            raise ValueError("weights.transport = 'broadcast' does not support rollout.ranks above 1: use another")
        if rollout.concurrency > 1:
            raise ValueError("rollout.ranks above 1 generate one batch at a time: rollout.concurrency must be 1")
        if rollout.batch_samples < rollout.ranks * rollout.group_size:
            raise ValueError(
                f"rollout.batch_samples = {rollout.batch_samples} holds no group of {rollout.group_size} for each of "
                f"{rollout.ranks} ranks; make it at least {rollout.ranks * rollout.group_size}"
            )
