"""What is minimised: a clipped policy gradient, corrected for the policy that really sampled the data.

Three policies meet here. The *sampling* policy made the tokens, some versions ago; its log-probabilities came with the
sample. The *old* policy is the one the step starts from. The *current* policy is being changed. The clip holds the
current policy near the old one, and the weight old / sampling, truncated at `importance_cap`, corrects for
stale data. With one update per step the first two gradients coincide and the clip is idle.

Every mean is over the whole update, so the gradient does not depend on how the data was cut into micro-batches.

Shape suffixes: R rows, T tokens in a row, M trained tokens, N sequences or episodes, S environment steps.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from penstock.engines.models import ActorCritic


class TokenLossSettings(msgspec.Struct, frozen=True, tag="tokens"):
    """For language models."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    importance: Literal["truncate", "mask", "none"] = "truncate"
    """Stale data: cap the weight; or drop tokens whose weight is outside [mask_low, mask_high]; or do not correct."""
    importance_cap: float = 2.0
    mask_low: float = 0.5
    mask_high: float = 5.0
    average: Literal["token", "sequence", "constant"] = "token"
    """Each token counts the same; or each sequence does; or the sum over tokens is divided by a constant length."""
    constant_length: int = 1
    """For the average "constant": the longest completion, say."""
    kl_coefficient: float = 0.0
    """Weight of the divergence from the reference, the initial model."""
    entropy_coefficient: float = 0.0
    temperature: float = 1.0
    """That of the sampling: the log-probabilities in the samples are those of the tempered policy."""


class PpoLossSettings(msgspec.Struct, frozen=True, tag="control"):
    """For gymnasium policies."""

    clip: float = 0.2
    importance_cap: float = 2.0
    discount: float = 0.98
    gae_lambda: float = 0.9
    value_coefficient: float = 0.5
    entropy_coefficient: float = 0.0


LossSettings = TokenLossSettings | PpoLossSettings


class TokenBatch(Protocol):
    """A micro-batch of sequences, as the batch stage packs it."""

    @property
    def token_ids_RT(self) -> np.ndarray: ...
    @property
    def position_ids_RT(self) -> np.ndarray: ...
    @property
    def sequences_RT(self) -> np.ndarray: ...
    @property
    def loss_mask_RT(self) -> np.ndarray: ...
    @property
    def logprobs_RT(self) -> np.ndarray: ...
    @property
    def advantages_N(self) -> np.ndarray: ...
    @property
    def trained_tokens_N(self) -> np.ndarray: ...
    @property
    def packed(self) -> bool: ...


class EpisodeBatch(Protocol):
    """Whole episodes end to end, as the batch stage packs them."""

    @property
    def observations_S(self) -> np.ndarray: ...
    @property
    def actions_S(self) -> np.ndarray: ...
    @property
    def logprobs_S(self) -> np.ndarray: ...
    @property
    def rewards_S(self) -> np.ndarray: ...
    @property
    def lengths_N(self) -> np.ndarray: ...
    @property
    def terminated_N(self) -> np.ndarray: ...
    @property
    def last_observations_N(self) -> np.ndarray: ...


class TokenTensors:
    """A token micro-batch on the training device, reduced to what predicts a trained token."""

    def __init__(self, batch: TokenBatch, device: torch.device) -> None:
        self.token_ids_RT = torch.from_numpy(batch.token_ids_RT.astype(np.int64)).to(device)
        rows, columns = np.nonzero(batch.loss_mask_RT)
        sequences_M = batch.sequences_RT[rows, columns].astype(np.int64)
        # The logits at column c predict the token at c + 1. Columns that predict nothing trained are never projected.
        kept, kept_M = np.unique(columns - 1, return_inverse=True)
        self.kept_columns = torch.from_numpy(kept).to(device)
        self.row_M = torch.from_numpy(rows).to(device)
        self.kept_M = torch.from_numpy(kept_M).to(device)
        self.target_M = torch.from_numpy(batch.token_ids_RT[rows, columns].astype(np.int64)).to(device)
        self.sampled_M = torch.from_numpy(batch.logprobs_RT[rows, columns]).to(device)
        self.advantage_M = torch.from_numpy(batch.advantages_N[sequences_M]).to(device)
        self.sequence_tokens_M = torch.from_numpy(batch.trained_tokens_N[sequences_M].astype(np.float32)).to(device)
        self.tokens = len(rows)
        self.sequences = int(np.count_nonzero(batch.trained_tokens_N))
        self.position_ids_RT: Tensor | None = None
        self.attention_RTT: Tensor | None = None
        if batch.packed:
            sequences_RT = torch.from_numpy(batch.sequences_RT).to(device)
            same = sequences_RT[:, :, None] == sequences_RT[:, None, :]
            self.attention_RTT = torch.tril(same)
            self.position_ids_RT = torch.from_numpy(batch.position_ids_RT.astype(np.int64)).to(device)

    def distribution_logits(self, module: nn.Module, temperature: float) -> Tensor:
        """Logits over the vocabulary, one row per trained token."""
        # Padding stands after each row's tokens, so the causal mask alone keeps it out unless rows are packed.
        attention = None if self.attention_RTT is None else self.attention_RTT[:, None]
        output = module(
            input_ids=self.token_ids_RT,
            attention_mask=attention,
            position_ids=self.position_ids_RT,
            use_cache=False,
            logits_to_keep=self.kept_columns,
        )
        return output.logits[self.row_M, self.kept_M].float() / temperature

    def logprobs(self, module: nn.Module, temperature: float) -> Tensor:
        """Of each trained token."""
        return -nn.functional.cross_entropy(
            self.distribution_logits(module, temperature), self.target_M, reduction="none"
        )


TOKEN_METRICS = ("loss", "entropy", "kl_sampling", "kl_reference", "ratio_mean", "clip_fraction", "capped_fraction")
"""What `token_loss` reports: sums over tokens, except the loss."""


def token_loss(
    batch: TokenTensors,
    module: nn.Module,
    settings: TokenLossSettings,
    *,
    total_tokens: int,
    total_sequences: int,
    old_M: Tensor | None = None,
    reference_M: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The micro-batch's share of the loss, and a tensor of `TOKEN_METRICS` with the largest ratio appended.

    Without `old_M` this is the only update of the step, and the current policy is the old one.
    """
    logits = batch.distribution_logits(module, settings.temperature)
    log_p = torch.log_softmax(logits, dim=-1)
    current_M = log_p.gather(-1, batch.target_M[:, None]).squeeze(-1)
    old_M = current_M.detach() if old_M is None else old_M
    weight_M = (old_M - batch.sampled_M).exp()
    ratio_max = weight_M.max()
    capped = torch.zeros_like(weight_M)
    ratio_sum = weight_M.sum()
    kl_sampling = (weight_M - 1 - (old_M - batch.sampled_M)).sum()
    if settings.importance == "truncate":
        capped = (weight_M > settings.importance_cap).float()
        weight_M = weight_M.clamp(max=settings.importance_cap)
    elif settings.importance == "mask":
        capped = ((weight_M < settings.mask_low) | (weight_M > settings.mask_high)).float()
        weight_M = weight_M * (1 - capped)
    else:
        weight_M = torch.ones_like(weight_M)
    objective_M, clipped = _clipped(current_M - old_M, batch.advantage_M, 1 - settings.clip_low, 1 + settings.clip_high)
    loss_M = -weight_M * objective_M
    with torch.set_grad_enabled(settings.entropy_coefficient != 0.0):
        entropy_M = -(log_p.exp() * log_p).sum(-1)
    if settings.entropy_coefficient:
        loss_M = loss_M - settings.entropy_coefficient * entropy_M
    kl_reference = torch.zeros(())
    if reference_M is not None:
        difference_M = reference_M - current_M
        divergence_M = difference_M.exp() - 1 - difference_M
        loss_M = loss_M + settings.kl_coefficient * divergence_M
        kl_reference = divergence_M.detach().sum()
    if settings.average == "token":
        loss = loss_M.sum() / total_tokens
    elif settings.average == "sequence":
        loss = (loss_M / batch.sequence_tokens_M).sum() / total_sequences
    else:
        loss = loss_M.sum() / (total_sequences * settings.constant_length)
    sums = [loss.detach(), entropy_M.detach().sum(), kl_sampling, kl_reference.to(loss.device), ratio_sum]
    return loss, torch.stack([*sums, clipped.sum(), capped.sum(), ratio_max])


class EpisodeTensors:
    """Episodes as tensors, with the old policy's values, advantages and log-probabilities worked out once."""

    def __init__(self, batch: EpisodeBatch, network: ActorCritic, settings: PpoLossSettings, device: torch.device):
        self.observations_S = torch.from_numpy(batch.observations_S).to(device)
        self.actions_S = torch.from_numpy(batch.actions_S).to(device)
        self.sampled_S = torch.from_numpy(batch.logprobs_S).to(device)
        lengths_N = torch.from_numpy(batch.lengths_N).to(device)
        ends_N = lengths_N.cumsum(0) - 1
        with torch.no_grad():
            values_S = network.value(self.observations_S)
            future_N = network.value(torch.from_numpy(batch.last_observations_N).to(device))
            next_values_S = values_S.roll(-1)
            next_values_S[ends_N] = future_N * (1 - torch.from_numpy(batch.terminated_N).to(device).float())
            # In units of the horizon, 1 / (1 - discount), values are of order 1: within a fresh critic's reach.
            rewards_S = torch.from_numpy(batch.rewards_S).to(device) * (1 - settings.discount)
            errors_S = rewards_S + settings.discount * next_values_S - values_S
            self.advantages_S = discounted_sums(errors_S, lengths_N, settings.discount * settings.gae_lambda)
            self.returns_S = self.advantages_S + values_S
            # In units of the returns' variance the value loss cannot drown the policy's gradient.
            self.value_scale = 0.5 / (float(self.returns_S.var(correction=0)) + 1e-2)
            self.old_S = network.distribution(self.observations_S).log_prob(self.actions_S)
        self.steps = len(self.sampled_S)


def discounted_sums(values_S: Tensor, lengths_N: Tensor, discount: float) -> Tensor:
    """Per step, the discounted sum of the values from there to the end of its episode; in log2(longest) passes."""
    ends_S = torch.repeat_interleave(lengths_N.cumsum(0), lengths_N)
    positions_S = torch.arange(len(values_S), device=values_S.device)
    sums_S = values_S.clone()
    longest = int(lengths_N.max())
    reach = 1  # sums_S covers `reach` steps from each position
    while reach < longest:
        inside = positions_S[: len(values_S) - reach] + reach < ends_S[: len(values_S) - reach]
        sums_S[: len(values_S) - reach] += torch.where(inside, discount**reach * sums_S[reach:], 0.0)
        reach *= 2
    return sums_S


CONTROL_METRICS = ("loss", "value_loss", "entropy", "kl_sampling", "ratio_mean", "clip_fraction", "capped_fraction")
"""What `ppo_loss` reports: means over the minibatch."""


def ppo_loss(
    batch: EpisodeTensors, chosen: Tensor, network: ActorCritic, settings: PpoLossSettings
) -> tuple[Tensor, Tensor]:
    """The loss over the environment steps `chosen`, and `CONTROL_METRICS` with the largest ratio appended."""
    observations = batch.observations_S[chosen]
    distribution = network.distribution(observations)
    current = distribution.log_prob(batch.actions_S[chosen])
    old = batch.old_S[chosen]
    raw_weight = (old - batch.sampled_S[chosen]).exp()
    weight = raw_weight.clamp(max=settings.importance_cap)
    advantage = batch.advantages_S[chosen]
    advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-6)
    objective, clipped = _clipped(current - old, advantage, 1 - settings.clip, 1 + settings.clip)
    value_loss = batch.value_scale * (network.value(observations) - batch.returns_S[chosen]).square().mean()
    entropy = distribution.entropy().mean()
    policy_loss = -(weight * objective).mean()
    loss = policy_loss + settings.value_coefficient * value_loss - settings.entropy_coefficient * entropy
    kl_sampling = (raw_weight - 1 - (old - batch.sampled_S[chosen])).mean()
    capped = (raw_weight > settings.importance_cap).float().mean()
    means = [loss, value_loss, entropy, kl_sampling, raw_weight.mean(), clipped.mean(), capped, raw_weight.max()]
    return loss, torch.stack(means).detach()


def _clipped(log_ratio: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """The pessimistic surrogate objective, and 1 where the clip stopped the gradient."""
    ratio = log_ratio.exp()
    free = ratio * advantage
    held = ratio.clamp(low, high) * advantage
    return torch.minimum(free, held), (held < free).float().detach()
