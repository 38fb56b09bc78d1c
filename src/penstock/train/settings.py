"""`[pipeline.train]` and the tables beside it: how a policy is trained on a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import model_validator

from penstock.control.settings import StepSection
from penstock.records.section import (
    LANGUAGE_ONLY,
    Fraction,
    ImportPath,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
)


class TrainSection(StepSection):
    loss: Annotated[str, LANGUAGE_ONLY] = "grpo"
    """`grpo`, `dr_grpo`, `gspo`, `cispo`, `dppo`, `distill`, `reinforce`, or your own as
    `package.module:function`."""
    teacher: Annotated[Path | None, LANGUAGE_ONLY] = None
    """For `distill`: the directory of a language model with the same vocabulary; it may be larger. The student is
    trained towards the teacher's probabilities of its own samples. Rewards are reported, not trained on."""
    advantage: Annotated[str, LANGUAGE_ONLY] = "grpo"
    """`grpo`, `dr_grpo`, `rloo`, `max_rl`, or your own as `package.module:function`."""
    truncated: Annotated[Literal["train", "mask"], LANGUAGE_ONLY] = "train"
    """Completions that were cut off at the token limit: train on them, or mask their tokens in the loss. Their rewards
    count in their group's advantages either way."""
    check_logprobs: bool = True
    """At the first step whose samples were drawn with the weights being trained, compare the log-probabilities of
    engine and trainer, and stop the run if rounding does not explain their difference."""
    overlong_tokens: Annotated[NonNegative, LANGUAGE_ONLY] = 0
    """Tokens before `rollout.max_new_tokens` over which the reward falls linearly, by up to `overlong_penalty`. Over
    several turns, the longest one counts."""
    overlong_penalty: Annotated[NonNegativeFloat, LANGUAGE_ONLY] = 1.0
    """With `overlong_tokens`: subtracted from the reward of a completion of the full length."""
    tokens_per_micro_batch: Annotated[Positive | None, LANGUAGE_ONLY] = None
    """Tokens of one forward and backward pass. Bounds memory; halved when a GPU runs out of it. By
    default 65536 if activations are recomputed from the start, else 16384."""
    packing: Annotated[Literal["prefix", "packed", "padded"], LANGUAGE_ONLY] = "prefix"
    """`packed` trains rows without padding; `prefix` also computes the prompt of a group only once;
    `padded` has one sequence per row. Models with sliding windows or recurrent layers always use `padded`."""
    activation_checkpointing: Annotated[bool | None, LANGUAGE_ONLY] = None
    """Keep activations only between layers and recompute the others: a third more computation, a
    fraction of the memory. By default all are kept until a step does not fit into GPU memory: that step is repeated,
    and from then on they are recomputed. A sharded model cannot repeat a step: with several ranks, or `fsdp`, a
    pretrained model on a GPU recomputes them from the start."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: a GPU if there is one. Every rank has its own; `cuda:1` selects that GPU."""
    threads: Positive = 1
    """Torch threads of each rank of the trainer."""
    fsdp: Annotated[bool, LANGUAGE_ONLY] = False
    """Use FSDP2 with one rank too: weights are held in float32 only, and in bfloat16 one block at a time. Saves 2 bytes
    for each parameter of a bfloat16 model. Several ranks always use it."""
    ranks: Positive | None = None
    """Processes that train one language model together, each with its shard of the weights (FSDP2) and share of the
    batch. By default one for each of `train_devices`, or one. All run on one machine."""


class TokenLossSection(Section):
    """The losses of language models; `train.loss` chooses one."""

    clip_low: Fraction = 0.2
    """A token's probability ratio is clipped below at 1 minus this, to limit the size of an update."""
    clip_high: NonNegativeFloat = 0.28
    """A token's probability ratio is clipped above at 1 plus this."""
    dual_clip: NonNegativeFloat = 0.0
    """`grpo`, `dr_grpo`: a token of negative advantage A loses at most this times |A|, for example 3; 0: no bound."""
    importance: Literal["truncate", "mask", "none"] = "truncate"
    """Importance weights of stale tokens, old policy / behaviour policy: cap them, drop tokens outside [mask_low,
    mask_high], or use no weights. Not for `cispo`, `dppo` and `distill`, whose own weight is against the behaviour
    policy."""
    importance_cap: PositiveFloat = 2.0
    """With `truncate`, and for `cispo`, `dppo` and `distill`: the largest weight of a token."""
    mask_low: NonNegativeFloat = 0.5
    """With `mask`: the smallest weight that is kept."""
    mask_high: PositiveFloat = 5.0
    """With `mask`: the largest weight that is kept."""
    trust_low: NonNegativeFloat = 0.2
    """`dppo`: a token is not made less probable once its probability is this much below the one it was sampled with."""
    trust_high: NonNegativeFloat = 0.2
    """`dppo`: a token is not made more probable once its probability is this much above the one it was sampled with."""
    average: Literal["token", "sequence", "constant"] | None = None
    """`token`: the mean over all trained tokens; `sequence`: over all samples of the update, each the mean of its
    tokens; `constant`: the sum over tokens, divided by all samples times `constant_length`. A sample whose tokens are
    masked counts as a sample. By default `sequence` for `gspo`, `constant` for `dr_grpo`, else `token`."""
    constant_length: Positive | None = None
    """For the average `constant`; `rollout.max_new_tokens` by default."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the KL divergence from the initial model."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus: for models trained from scratch, not for pretrained ones."""


class PpoLossSection(Section):
    """The loss of gymnasium policies."""

    clip: PositiveFloat = 0.2
    """An action's probability ratio is clipped at 1 minus and 1 plus this."""
    importance_cap: PositiveFloat = 2.0
    """The largest importance weight of a stale action."""
    discount: Fraction = 0.98
    """Discount per environment step. Below 1, the return of an episode that a time limit cuts off includes the value of
    its last observation; at 1 the time limit ends the episode, and the return is the sum of rewards until then."""
    gae_lambda: Fraction = 0.9
    """λ of generalised advantage estimation: 0 uses one step and the value network, 1 all rewards to the end."""
    value_coefficient: NonNegativeFloat = 0.5
    """Weight of the value network's loss."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""


class OptimizerSection(Section):
    """The optimiser, its learning rate over time, and how a step uses it."""

    name: ImportPath = "torch.optim:AdamW"
    """The class, for example `torch.optim:SGD`. It receives the keys below that it accepts."""
    options: dict[str, Any] = {}
    """Further keyword arguments of the class."""
    learning_rate: PositiveFloat = 1e-3
    """After warm-up."""
    beta1: Fraction = 0.9
    """Decay rate of the running mean of gradients."""
    beta2: Fraction = 0.95
    """Decay rate of the running mean of squared gradients."""
    epsilon: PositiveFloat = 1e-8
    """Added to the denominator."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled from the gradient. Norms and biases are not decayed."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients with a larger norm are clipped to this."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after warm-up. Models of kind `tiny` and `mlp`: `linear`."""
    warmup_steps: NonNegative = 0
    """Steps over which the learning rate rises from zero."""
    decay_steps: Positive | None = None
    """With `linear` and `cosine`: the step at which `final_fraction` is reached; the pipeline's `steps` by default."""
    final_fraction: Fraction = 0.1
    """Fraction of the learning rate that is reached after `decay_steps`."""
    epochs: Positive = 1
    """Passes over each batch."""
    minibatches: Positive = 1
    """Updates per pass. Language models: a batch has at least this many micro-batches if it has enough samples."""
    offload: bool = False
    """Keep float32 masters and the optimiser's state in host memory and update there. Saves 12 bytes of GPU memory for
    each trained parameter; the update is slower (raise `train.threads`). For language models on one rank."""
    skip_updates: NonNegative = 3
    """Consecutive updates that are skipped because their loss or gradient is not finite. One more fails the run."""

    @model_validator(mode="after")
    def _decay_needs_a_schedule(self) -> OptimizerSection:
        if self.decay_steps is not None and self.schedule == "constant":
            raise ValueError("decay_steps needs schedule = 'linear' or 'cosine'")
        return self


class CheckpointSection(Section):
    every_steps: Positive = 20
    """Steps between two checkpoints: the most that a killed trainer has to repeat."""
    keep: Positive = 2
    """Number of newest checkpoints that stay on disk."""
    keep_best: bool = True
    """Also keep the checkpoint with the best evaluation, in `best/`. Only versions that are due for both
    `evaluation.every_steps` and `checkpoint.every_steps` are compared."""


class SamplesSection(Section):
    save_every_steps: NonNegative = 10
    """Steps between readable samples in `rollouts/`; 0 writes none."""
    save_count: Positive = 8
    """Samples of each such step."""
