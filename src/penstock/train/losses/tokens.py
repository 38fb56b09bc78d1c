"""Losses of language models, by name: each defines what is minimised for every trained token.

    def reinforce(tokens: Tokens, settings: TokenLossSection) -> tuple[Tensor, dict[str, Tensor]]:
        return -tokens.advantage_M * tokens.current_M, {}

`train.loss` names one of `NAMED`, or such a function as `package.module:function`. The learner adds the entropy bonus
and the divergence from the reference, and averages over the whole update, so no result depends on micro-batches.
Metrics are sums over the micro-batch's tokens; one whose name ends in `_max` is a maximum.

Three policies are involved. The *behaviour* policy μ sampled the tokens, some versions ago; its log-probabilities are
part of the sample. The *old* policy is the one the step starts from. The *current* policy π is being changed. With one
update per step, current and old are equal in value, and only the gradient of the current one counts.

Shape suffixes: M trained tokens, N sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from penstock.runtime.named import load_callable
from penstock.train.settings import TokenLossSection

if TYPE_CHECKING:
    from torch import Tensor

Average = Literal["token", "sequence", "constant"]

MAX_LOG_RATIO = 20.0
"""A ratio of probabilities stops at exp of this, 5e8, and so does its gradient: float32 overflows at exp(89)."""
LOWEST_LOGPROB = -1e4
"""Log-probabilities stop here: the difference of two that are -inf is no number."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The trained tokens of a micro-batch. Only `current_M` has a gradient."""

    current_M: Tensor
    """Log-probabilities, like the next two and the teacher's: none is below `LOWEST_LOGPROB`."""
    old_M: Tensor
    behaviour_M: Tensor
    advantage_M: Tensor
    sequence_M: Tensor
    """Which of the N sequences a token belongs to; all tokens of a sequence are here."""
    sequences: int
    teacher_M: Tensor | None = None
    """Log-probabilities that the model of `train.teacher` gives the same tokens; None without one."""

    def sequence_mean(self, values_M: Tensor) -> Tensor:
        """The mean over each token's sequence, one for every token."""
        zeros_N = values_M.new_zeros(self.sequences)
        sums_N = zeros_N.index_add(0, self.sequence_M, values_M)
        counts_N = zeros_N.index_add(0, self.sequence_M, values_M.new_ones(values_M.shape))
        return (sums_N / counts_N.clamp(min=1))[self.sequence_M]


TokenLoss = Callable[[Tokens, TokenLossSection], "tuple[Tensor, dict[str, Tensor]]"]


def floored(logprobs: Tensor) -> Tensor:
    """None below `LOWEST_LOGPROB`; those that were have no gradient."""
    return logprobs.clamp(min=LOWEST_LOGPROB)


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp of the difference of two log-probabilities, at most exp(MAX_LOG_RATIO): finite, and so is its gradient."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def clipped(ratio: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """min(r·A, clip(r, low, high)·A), and 1 where the clip stops the gradient."""
    free = ratio * advantage
    held = ratio.clamp(low, high) * advantage
    return free.minimum(held), (held < free).float().detach()


def behaviour_weight(log_weight: Tensor, settings: TokenLossSection) -> tuple[Tensor, Tensor]:
    """The weight of a stale token, old / μ after `importance` is applied, and 1 where that changed it."""
    weight = ratio_of(log_weight)
    if settings.importance == "truncate":
        return weight.clamp(max=settings.importance_cap), (weight > settings.importance_cap).float()
    if settings.importance == "mask":
        outside = (weight < settings.mask_low) | (weight > settings.mask_high)
        return weight.where(~outside, 0.0), outside.float()
    return weight.new_ones(weight.shape), weight.new_zeros(weight.shape)


def grpo(tokens: Tokens, settings: TokenLossSection) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate, token by token, with a separate upper clip (clip-higher):

        loss_t = −w_t · min(r_t A, clip(r_t, 1 − clip_low, 1 + clip_high) A),   r_t = π / old,   w_t = old / μ

    With `dual_clip` = c > 0, tokens of a negative advantage lose no more than c·|A|: max(…, c·A).
    """
    weight_M, capped_M = behaviour_weight(tokens.old_M - tokens.behaviour_M, settings)
    ratio_M = ratio_of(tokens.current_M - tokens.old_M)
    objective_M, stopped_M = clipped(ratio_M, tokens.advantage_M, 1 - settings.clip_low, 1 + settings.clip_high)
    if settings.dual_clip:
        floor_M = settings.dual_clip * tokens.advantage_M
        held_M = (tokens.advantage_M < 0) & (objective_M < floor_M)
        objective_M = objective_M.where(~held_M, floor_M)
        stopped_M = stopped_M.maximum(held_M.float())
    return -weight_M * objective_M, {"clip_fraction": stopped_M.sum(), "capped_fraction": capped_M.sum()}


def gspo(tokens: Tokens, settings: TokenLossSection) -> tuple[Tensor, dict[str, Tensor]]:
    """One ratio for a whole sequence, the geometric mean of its tokens' ratios, clipped as a whole:

        loss_t = −w_t · min(s_i A, clip(s_i, 1 − clip_low, 1 + clip_high) A),   s_i = exp(mean_t log π / old)

    Stale tokens are weighed one by one, as in `grpo`: w_t = old / μ, with `importance` applied. The clip range is much
    smaller than that of tokens: for example `clip_low = 3e-4` and `clip_high = 4e-4`. The average is by sequence. Each
    branch of a sample is a sequence here.
    """
    weight_M, capped_M = behaviour_weight(tokens.old_M - tokens.behaviour_M, settings)
    ratio_M = ratio_of(tokens.sequence_mean(tokens.current_M - tokens.old_M))
    objective_M, stopped_M = clipped(ratio_M, tokens.advantage_M, 1 - settings.clip_low, 1 + settings.clip_high)
    return -weight_M * objective_M, {"clip_fraction": stopped_M.sum(), "capped_fraction": capped_M.sum()}


def cispo(tokens: Tokens, settings: TokenLossSection) -> tuple[Tensor, dict[str, Tensor]]:
    """No token's gradient is stopped; its importance weight is capped instead, and has no gradient (sg). The weight is
    that against the behaviour policy, so it also corrects for staleness; `importance` is not applied besides:

        loss_t = −sg(min(π / μ, importance_cap)) · A · log π
    """
    weight_M = ratio_of((tokens.current_M - tokens.behaviour_M).detach())
    capped_M = (weight_M > settings.importance_cap).float()
    weight_M = weight_M.clamp(max=settings.importance_cap)
    return -weight_M * tokens.advantage_M * tokens.current_M, {"capped_fraction": capped_M.sum()}


def dppo(tokens: Tokens, settings: TokenLossSection) -> tuple[Tensor, dict[str, Tensor]]:
    """A trust region against the behaviour policy: a token that is outside it, and would be pushed further out, is
    masked. The distance is the difference of probabilities, which stays small for rare tokens with large ratios:

        loss_t = −m_t · sg(min(π / μ, importance_cap)) · A · log π
        m_t = 0  if  A > 0 and π − μ > trust_high,  or  A < 0 and μ − π > trust_low;  else 1
    """
    distance_M = tokens.current_M.detach().exp() - tokens.behaviour_M.exp()
    above_M = (tokens.advantage_M > 0) & (distance_M > settings.trust_high)
    below_M = (tokens.advantage_M < 0) & (distance_M < -settings.trust_low)
    masked_M = (above_M | below_M).float()
    loss_M, metrics = cispo(tokens, settings)
    return loss_M * (1 - masked_M), metrics | {"clip_fraction": masked_M.sum()}


def distill(tokens: Tokens, settings: TokenLossSection) -> tuple[Tensor, dict[str, Tensor]]:
    """On-policy distillation: the reverse divergence from the teacher T, KL(π ‖ T), token by token. Its gradient is
    E[(log π − log T) · ∇ log π] over the student's own samples, so a token that is less probable under the teacher has
    a negative advantage:

        loss_t = −sg(min(π / μ, importance_cap) · (log T − log π)) · log π
    """
    assert tokens.teacher_M is not None
    current_M = tokens.current_M.detach()
    weight_M = ratio_of(current_M - tokens.behaviour_M)
    capped_M = (weight_M > settings.importance_cap).float()
    advantage_M = weight_M.clamp(max=settings.importance_cap) * (tokens.teacher_M - current_M)
    metrics = {"capped_fraction": capped_M.sum(), "kl_teacher": (current_M - tokens.teacher_M).sum()}
    return -advantage_M * tokens.current_M, metrics


def reinforce(tokens: Tokens, settings: TokenLossSection) -> tuple[Tensor, dict[str, Tensor]]:
    """The plain policy gradient, with stale tokens weighted according to `importance`. Nothing is clipped: for one
    update per batch.

        loss_t = −w_t · A · log π,   w_t = old / μ
    """
    weight_M, capped_M = behaviour_weight(tokens.old_M - tokens.behaviour_M, settings)
    return -weight_M * tokens.advantage_M * tokens.current_M, {"capped_fraction": capped_M.sum()}


NAMED: dict[str, tuple[TokenLoss, Average]] = {
    "grpo": (grpo, "token"),
    "dr_grpo": (grpo, "constant"),
    "gspo": (gspo, "sequence"),
    "cispo": (cispo, "token"),
    "dppo": (dppo, "token"),
    "distill": (distill, "token"),
    "reinforce": (reinforce, "token"),
}
"""Each with its default average, which `token_loss.average` overrides. Dr. GRPO is GRPO summed over tokens and divided
by a constant, which removes the bias by length."""


def resolve(name: str) -> tuple[TokenLoss, Average]:
    """The loss called `name` in `NAMED`, or the function at `package.module:function`, averaged over tokens."""
    return NAMED[name] if name in NAMED else (load_callable("loss", name, NAMED), "token")


def divergence(current_M: Tensor, reference_M: Tensor) -> Tensor:
    """The estimate k3 of KL(π ‖ reference): ρ − 1 − log ρ with ρ = reference / π. Never negative; unbiased as long as
    log ρ is below `MAX_LOG_RATIO`."""
    difference_M = (reference_M - current_M).clamp(max=MAX_LOG_RATIO)
    return difference_M.exp() - 1 - difference_M
