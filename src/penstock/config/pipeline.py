"""One pipeline of the user's configuration: what it trains, on what, and how."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from penstock.config.engine import Engine, TorchEngineSection, VllmEngineSection
from penstock.config.recommended import fill_in
from penstock.config.section import (
    Fraction,
    ImportPath,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Seconds,
    Section,
)


class EnvSection(Section):
    name: str
    """A built-in task (`copy`, `reverse`, `sort`, `arithmetic`), `gymnasium` (with `options.id`), `jsonl` (with
    `options.path`), or your own as `package.module:Name`."""
    options: dict[str, str | int | float | bool | list[str] | list[int] | list[float]] = {}
    """Passed to the environment as keyword arguments."""
    rewards: list[str] = []
    """Reward functions used instead of the task's own: `exact_answer`, `contains_answer`, `matching_positions`, or your
    own `f(prompts, completions, **columns) -> list[float | None]` as `package.module:function`."""
    reward_weights: list[float] = []
    """One weight per reward function; all equal when empty."""


class TinyModel(Section):
    """A small causal language model built from a config, with a character tokenizer of its own."""

    kind: Literal["tiny"] = "tiny"
    """Chooses this table."""
    hidden: Positive = 128
    """Width of its layers."""
    layers: Positive = 1
    """Transformer layers."""
    heads: Positive = 4
    """Attention heads of each layer; must divide `hidden`."""
    max_length: Positive = 128
    """Tokens of prompt and completions together."""


class PathModel(Section):
    """A pretrained model from a local directory (config.json and safetensors, or one GGUF file)."""

    kind: Literal["path"] = "path"
    """Chooses this table."""
    path: Path
    """The directory."""
    gguf_file: str = ""
    """The file in it, if the weights are in GGUF."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the model is trained and served in."""


class MlpModel(Section):
    """A policy and value network for gymnasium environments."""

    kind: Literal["mlp"] = "mlp"
    """Chooses this table."""
    hidden: Positive = 64
    """Width of its layers."""


Model = Annotated[TinyModel | PathModel | MlpModel, Field(discriminator="kind")]


class RolloutSection(Section):
    workers: Positive = 1
    """Processes that generate samples."""
    ranks: Positive = 1
    """Processes of one worker that generate in step, each with an engine of its own and its share of every batch."""
    devices_per_worker: Positive = 1
    """Devices of the pool that one worker occupies while it is awake."""
    workload: ImportPath | None = None
    """Your own five hooks, as `package.module:Class`; the built-in one fits the environment otherwise."""
    group_size: Positive = 8
    """Samples per prompt."""
    batch_samples: Positive = 64
    """Samples generated at once."""
    max_new_tokens: Positive = 16
    """Language models: the longest completion."""
    temperature: PositiveFloat = 1.0
    """Language models: of the sampling."""
    top_k: Positive | None = None
    """Draw only from so many most likely tokens. With this, `top_p` or `min_p` the samples come from a narrower policy
    than the one that is trained: their recorded log-probabilities are those of the narrower one, so the importance
    weight of an up-to-date token is the share p <= 1 of the full distribution that was left, and what was cut off is
    never learned about. `token_loss.importance = "none"` weighs all tokens alike instead."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw only from the most likely tokens that together have this probability; applies after `min_p` and `top_k`."""
    min_p: Fraction = 0.0
    """Draw only from tokens at least this likely in proportion to the most likely one."""
    max_turns: Positive = 1
    """Language models: how many completions one episode may have."""
    reply_threads: Positive = 8
    """Request engines: how many environments may think about their reply at once."""
    prefetch: bool = True
    """Overlap leasing, preparation and post-processing with generation. Read live."""
    queue_samples: Positive = 128
    """Bound on samples waiting between two stages."""
    queue_mb: Positive = 1024
    """Bound on prepared and generated data waiting between two stages."""
    concurrency: Positive = 1
    """Generate calls in flight, each of up to `batch_samples`: 1 for a batch engine, many for a request engine. For a
    request engine, and neither of the two given, a call is one group and there are enough to fill its rows twice."""
    preparations: Positive = 1
    """Prompts prepared at once."""
    preparation_processes: NonNegative = 0
    """Language models: processes that read prompts from the environment. 0 reads them in threads of the worker, which
    is better unless reading a prompt computes in Python for long."""
    ring_mb: Positive = 64
    """Shared memory for finished samples that the trainer has not fetched yet."""
    ring_slots: Positive = 4096
    """How many samples that may be."""
    max_failures: Positive = 3
    """A prompt that fails so often is set aside with its error."""
    max_losses: Positive | None = None
    """A prompt whose workers die so often is set aside too. Off by default: workers die for other reasons."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: a GPU if there is one."""
    threads: Positive = 1
    """Torch threads of a worker."""


class TrainSection(Section):
    groups_per_step: Positive = 16
    """Prompts per optimiser step."""
    max_staleness: NonNegative = 2
    """No sample is trained more than so many versions after the weights it was generated with."""
    straggler_wait_s: NonNegativeFloat = 0.0
    """How long a batch may wait for groups that would be outdated afterwards. 0 never waits: they are made again."""
    advantage: str = "grpo"
    """`grpo`, `dr_grpo`, `rloo`, `max_rl`, or your own as `package.module:function`."""
    filters: list[str] = []
    """Group filters, for example `zero_signal`, or your own as `package.module:function`."""
    tokens_per_micro_batch: Positive = 16384
    """Language models: tokens of one forward and backward pass. Bounds memory."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: a GPU if there is one."""
    threads: Positive = 1
    """Torch threads of the trainer."""


class TokenLossSection(Section):
    """The loss of language models; the fields of `train.loss.TokenLossSettings`."""

    clip_low: Fraction = 0.2
    """A token's probability ratio is clipped at 1 minus this, against a step that goes too far."""
    clip_high: NonNegativeFloat = 0.28
    """And at 1 plus this."""
    importance: Literal["truncate", "mask", "none"] = "truncate"
    """Stale samples: cap their weight, drop tokens whose weight is outside [mask_low, mask_high], or neither."""
    importance_cap: PositiveFloat = 2.0
    """With `truncate`: the largest weight of a token."""
    mask_low: NonNegativeFloat = 0.5
    """With `mask`: the smallest weight that is kept."""
    mask_high: PositiveFloat = 5.0
    """With `mask`: the largest weight that is kept."""
    average: Literal["token", "sequence", "constant"] = "token"
    """Each token counts the same; or each sequence does; or the sum over tokens is divided by `constant_length`."""
    constant_length: Positive = 1
    """For the average `constant`: the longest completion, say."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the divergence from the initial model."""
    entropy_coefficient: float = 0.0
    """Reward for staying undecided: for models trained from nothing, not for pretrained ones."""


class ControlLossSection(Section):
    """The loss of gymnasium policies; the fields of `train.loss.ControlLossSettings`."""

    clip: PositiveFloat = 0.2
    """An action's probability ratio is clipped at 1 minus and 1 plus this."""
    importance_cap: PositiveFloat = 2.0
    """The largest weight of a stale action."""
    discount: Fraction = 0.98
    """What a reward is worth one environment step earlier."""
    gae_lambda: Fraction = 0.9
    """How far advantages look beyond the value network: 0 one step, 1 to the end."""
    value_coefficient: NonNegativeFloat = 0.5
    """Weight of the value network's loss."""
    entropy_coefficient: float = 0.0
    """Reward for staying undecided."""


class OptimizerSection(Section):
    """AdamW; the fields of `train.step.OptimSettings`."""

    learning_rate: PositiveFloat = 1e-3
    """After warm-up."""
    beta1: Fraction = 0.9
    """Memory of the mean of gradients."""
    beta2: Fraction = 0.95
    """Memory of the mean of their squares."""
    epsilon: PositiveFloat = 1e-8
    """Added to the denominator."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled from the gradient."""
    max_grad_norm: PositiveFloat = 1.0
    """Longer gradients are shortened to this."""
    warmup_steps: NonNegative = 0
    """The learning rate rises from zero over so many steps."""
    decay_steps: NonNegative = 0
    """The learning rate falls in a line to `final_fraction` of itself over so many steps; 0: it does not fall.
    Models of kind `tiny` and `mlp`: the pipeline's `steps`."""
    final_fraction: Fraction = 0.1
    """Of the learning rate, at the end of `decay_steps`."""
    epochs: Positive = 1
    """Gymnasium: passes over each batch."""
    minibatches: Positive = 1
    """Gymnasium: updates per pass."""


class CheckpointSection(Section):
    every_steps: Positive = 20
    """Steps between two checkpoints: what a killed trainer may have to train again."""
    keep: Positive = 2
    """Newest checkpoints that stay on disk."""


class WeightsSection(Section):
    way: Literal["staged", "in_place"] = "staged"
    """`staged` loads beside the serving weights and swaps; `in_place` saves memory and pauses generation."""
    mover: Literal["auto", "files", "pull", "broadcast"] = "auto"
    """How versions reach the workers: `files` of a directory they share with the trainer; `pull` over the network, by
    the payloads' carrier; `broadcast` to all who wait, and to stragglers as `auto` does; `auto` takes the nearest way:
    device memory on the trainer's GPU, files on its host, pull elsewhere."""
    streams: Positive = 4
    """Connections that one worker pulls with at once."""
    keep: Positive = 3
    """Versions kept on disk."""
    deadline_s: Seconds = 60.0
    """How long one update of one worker may take."""
    on_fault: Literal["restore", "evict", "fail"] = "restore"
    """What becomes of an engine that holds a mixture of versions: it is brought to a whole one, its worker is replaced,
    or the run fails."""
    min_healthy: NonNegative = 0
    """Workers that must serve: none of them is replaced while fewer others do, and the run fails if that lasts."""


class SamplesSection(Section):
    save_every_steps: NonNegative = 10
    """Write readable samples to `rollouts/` every so many steps; 0 never."""
    save_count: Positive = 8
    """Samples of each such step."""


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


class PipelineSection(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
    """Names it in the view, in files and in `--set`."""
    steps: Positive
    """Optimiser steps to train."""
    epochs: Positive | None = None
    """Stop after so many passes over a finite environment, if that comes before `steps`."""
    weight: PositiveFloat = 1.0
    """Share of the pool in proportion to other pipelines."""
    min_workers: NonNegative = 0
    """Workers that are kept for it on a shared pool whenever it has work for them."""
    max_workers: Positive | None = None
    """Workers it may have awake at once; all of `rollout.workers` by default."""
    train_devices: list[int] = []
    """Devices of the pool that it trains on; the first one by default."""
    rollout_devices: list[int] = []
    """Devices of the pool that it may generate on, also others' training devices; all by default."""
    env: EnvSection
    model: Model
    engine: Engine = TorchEngineSection()
    rollout: RolloutSection = RolloutSection()
    train: TrainSection = TrainSection()
    token_loss: TokenLossSection = TokenLossSection()
    control_loss: ControlLossSection = ControlLossSection()
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
    def kind(self) -> Literal["language", "gymnasium"]:
        return "gymnasium" if self.env.name == "gymnasium" else "language"

    @model_validator(mode="after")
    def _model_fits_environment(self) -> PipelineSection:
        if self.rollout.workload is None and (self.kind == "gymnasium") != isinstance(self.model, MlpModel):
            wanted = "mlp" if self.kind == "gymnasium" else "tiny or path"
            raise ValueError(f"environment {self.env.name!r} needs a model of kind {wanted}, found {self.model.kind!r}")
        if isinstance(self.engine, VllmEngineSection) and isinstance(self.model, MlpModel):
            raise ValueError("engine.kind = 'vllm' serves language models only; use 'torch' for gymnasium policies")
        if isinstance(self.model, MlpModel) and getattr(self.engine, "batching", "static") != "static":
            raise ValueError("engine.batching = 'continuous' is for language models; gymnasium policies act in batches")
        self._check_truncation()
        self._check_ranks()
        self._check_evaluation()
        if self.rollout.preparation_processes and self.kind == "gymnasium":
            raise ValueError("rollout.preparation_processes reads prompts, which gymnasium environments do not have")
        if self.env.reward_weights and len(self.env.reward_weights) != len(self.env.rewards):
            raise ValueError(
                f"env.reward_weights has {len(self.env.reward_weights)} entries for {len(self.env.rewards)} rewards"
            )
        return self

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

    def _check_ranks(self) -> None:
        rollout = self.rollout
        if rollout.ranks == 1:
            return
        if not isinstance(self.engine, TorchEngineSection) or self.engine.batching != "static":
            raise ValueError("rollout.ranks above 1 needs an engine of kind 'torch' with batching = 'static'")
        if self.weights.mover == "broadcast":
            raise ValueError("rollout.ranks above 1 cannot be broadcast to: weights.mover must be another")
        if rollout.concurrency > 1:
            raise ValueError("rollout.ranks above 1 go batch by batch: rollout.concurrency must be 1")
        if rollout.batch_samples < rollout.ranks * rollout.group_size:
            raise ValueError(
                f"rollout.batch_samples = {rollout.batch_samples} holds no group of {rollout.group_size} for each of "
                f"{rollout.ranks} ranks; make it at least {rollout.ranks * rollout.group_size}"
            )
