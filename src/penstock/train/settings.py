"""`[pipeline.train]` and the tables beside it: how a policy learns from a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from penstock.control.settings import StepSection
from penstock.records.section import (
    Fraction,
    ImportPath,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
)


class TrainSection(StepSection):
    loss: str = "grpo"
    """Language models: `grpo`, `dr_grpo`, `gspo`, `cispo`, `dppo`, `distill`, `reinforce`, or your own as
    `package.module:function`."""
    teacher: Path | None = None
    """For `distill`: the directory of a language model with the same vocabulary; it may be larger. The student learns
    to give its own samples the probabilities that the teacher gives them; rewards are reported and not trained on."""
    advantage: str = "grpo"
    """`grpo`, `dr_grpo`, `rloo`, `max_rl`, or your own as `package.module:function`."""
    truncated: Literal["train", "mask"] = "train"
    """Completions that were cut off at the token limit: train on them, or leave their tokens out of the loss. Their
    rewards count in their group's advantages either way."""
    overlong_tokens: NonNegative = 0
    """The stretch of tokens before `rollout.max_new_tokens` over which the reward falls by up to `overlong_penalty`."""
    overlong_penalty: NonNegativeFloat = 1.0
    """With `overlong_tokens`: what a completion of the full length loses."""
    tokens_per_micro_batch: Positive | None = None
    """Language models: tokens of one forward and backward pass. Bounds memory; halved when a GPU runs out of it. By
    default 65536 if activations are recomputed from the start, else 16384."""
    packing: Literal["prefix", "packed", "padded"] = "prefix"
    """Language models: `packed` trains rows without padding; `prefix` also reads the prompt of a group only once;
    `padded` has one sequence in a row, as models with sliding windows or recurrent layers need: they are given it."""
    activation_checkpointing: bool | None = None
    """Language models: keep activations only between layers and compute the others again, which takes a third more
    computation and a fraction of the memory. By default they are kept until a step does not fit into the GPU's memory:
    it is repeated, and from then on they are recomputed. Shards cannot repeat a step: with several ranks, or `fsdp`, a
    pretrained model on a GPU recomputes them from the start."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: a GPU if there is one. Every rank has its own; `cuda:1` is that one."""
    threads: Positive = 1
    """Torch threads of the trainer, of each rank."""
    fsdp: bool = False
    """One rank, too, holds its weights as FSDP2 does: in float32 only, in bfloat16 one block at a time. 2 bytes less
    for each parameter of a bfloat16 model. Several ranks always do."""
    ranks: Positive | None = None
    """Processes that train one language model together, each with its part of the weights (FSDP2) and of the batch.
    By default one for each of `train_devices`, or one. They share a machine."""


class TokenLossSection(Section):
    """The losses of language models; `train.loss` chooses one."""

    clip_low: Fraction = 0.2
    """A token's probability ratio is clipped at 1 minus this, against a step that goes too far."""
    clip_high: NonNegativeFloat = 0.28
    """And at 1 plus this."""
    dual_clip: NonNegativeFloat = 0.0
    """`grpo`, `dr_grpo`: a token of negative advantage loses at most this times the advantage (3, say); 0: no bound."""
    importance: Literal["truncate", "mask", "none"] = "truncate"
    """Stale samples: cap their weight, drop tokens whose weight is outside [mask_low, mask_high], or neither."""
    importance_cap: PositiveFloat = 2.0
    """With `truncate`, and for `cispo`, `dppo` and `distill`: the largest weight of a token."""
    mask_low: NonNegativeFloat = 0.5
    """With `mask`: the smallest weight that is kept."""
    mask_high: PositiveFloat = 5.0
    """With `mask`: the largest weight that is kept."""
    trust_low: NonNegativeFloat = 0.2
    """`dppo`: a token is not made less probable once its probability is this much below the one it was sampled with."""
    trust_high: NonNegativeFloat = 0.2
    """`dppo`: nor more probable once it is this much above."""
    average: Literal["token", "sequence", "constant"] | None = None
    """Each token counts the same; or each sample does; or the sum over tokens is divided by `constant_length`. By
    default what the loss is defined with: `sequence` for `gspo`, `constant` for `dr_grpo`, else `token`."""
    constant_length: Positive | None = None
    """For the average `constant`; `rollout.max_new_tokens` by default."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the divergence from the initial model."""
    entropy_coefficient: float = 0.0
    """Reward for staying undecided: for models trained from nothing, not for pretrained ones."""


class PpoLossSection(Section):
    """The loss of gymnasium policies."""

    clip: PositiveFloat = 0.2
    """An action's probability ratio is clipped at 1 minus and 1 plus this."""
    importance_cap: PositiveFloat = 2.0
    """The largest weight of a stale action."""
    discount: Fraction = 0.98
    """What a reward is worth one environment step earlier. Below 1 an episode that a time limit cuts off counts as if
    it went on; at 1 the time limit is an end like any other, and what is learned is the sum of rewards until then."""
    gae_lambda: Fraction = 0.9
    """How far advantages look beyond the value network: 0 one step, 1 to the end."""
    value_coefficient: NonNegativeFloat = 0.5
    """Weight of the value network's loss."""
    entropy_coefficient: float = 0.0
    """Reward for staying undecided."""


class OptimizerSection(Section):
    """The optimiser, its learning rate over time, and how a step uses it."""

    name: ImportPath = "torch.optim:AdamW"
    """The class, for example `torch.optim:SGD`. It is given the keys below that it takes."""
    options: dict[str, Any] = {}
    """Further keyword arguments of the class."""
    learning_rate: PositiveFloat = 1e-3
    """After warm-up."""
    beta1: Fraction = 0.9
    """Memory of the mean of gradients."""
    beta2: Fraction = 0.95
    """Memory of the mean of their squares."""
    epsilon: PositiveFloat = 1e-8
    """Added to the denominator."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled from the gradient. Norms and biases are not decayed."""
    max_grad_norm: PositiveFloat = 1.0
    """Longer gradients are shortened to this."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after warm-up. Models of kind `tiny` and `mlp`: `linear`."""
    warmup_steps: NonNegative = 0
    """Steps over which the learning rate rises from zero."""
    decay_steps: Positive | None = None
    """With `linear` and `cosine`: the step at which `final_fraction` is reached; the pipeline's `steps` by default."""
    final_fraction: Fraction = 0.1
    """Of the learning rate, at the end of `decay_steps`."""
    epochs: Positive = 1
    """Passes over each batch."""
    minibatches: Positive = 1
    """Updates per pass. Language models: a batch is cut into at least as many micro-batches if it has the samples."""
    offload: bool = False
    """Keep float32 masters and the optimiser's state in host memory and update there: 12 bytes of a GPU's memory less
    for each trained parameter, a slower update (raise `train.threads`). For one rank."""
    skip_updates: NonNegative = 3
    """How many updates in a row may have a loss or gradient that is not finite: they are skipped. One more fails the
    run."""

    @model_validator(mode="after")
    def _decay_needs_a_schedule(self) -> OptimizerSection:
        if self.decay_steps is not None and self.schedule == "constant":
            raise ValueError("decay_steps needs schedule = 'linear' or 'cosine'")
        return self


class CheckpointSection(Section):
    every_steps: Positive = 20
    """Steps between two checkpoints: what a killed trainer may have to train again."""
    keep: Positive = 2
    """Newest checkpoints that stay on disk."""
    keep_best: bool = True
    """Keep the checkpoint that was evaluated best too, in `best/`. Versions are evaluated where
    `evaluation.every_steps` and `checkpoint.every_steps` meet."""


class SamplesSection(Section):
    save_every_steps: NonNegative = 10
    """Steps between readable samples in `rollouts/`; 0 writes none."""
    save_count: Positive = 8
    """Samples of each such step."""
