"""`[pipeline.train]` and the tables beside it: how a policy learns from a batch."""

from __future__ import annotations

from typing import Literal

from penstock.records.section import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section


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


class PpoLossSection(Section):
    """The loss of gymnasium policies; the fields of `train.loss.PpoLossSettings`."""

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


class SamplesSection(Section):
    save_every_steps: NonNegative = 10
    """Write readable samples to `rollouts/` every so many steps; 0 never."""
    save_count: Positive = 8
    """Samples of each such step."""
