"""The loss of gymnasium policies: a clipped policy gradient with advantages from a value network.

Shape suffixes: N episodes, S environment steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.batch.pack import TrajectoryBatch
from penstock.engines.models import ActorCritic
from penstock.train.losses.tokens import clipped, floored, ratio_of
from penstock.train.settings import PpoLossSection

MIN_SPREAD = 0.05
"""As a fraction of the spread of returns: a smaller spread of advantages is noise of the critic, not scaled up."""


class EpisodeTensors:
    """Episodes as tensors, with the old policy's values, advantages and log-probabilities computed once."""

    def __init__(self, batch: TrajectoryBatch, network: ActorCritic, settings: PpoLossSection, device: torch.device):
        self.observations_S = torch.from_numpy(batch.observations_S).to(device)
        self.actions_S = torch.from_numpy(batch.actions_S).to(device)
        self.sampled_S = torch.from_numpy(batch.logprobs_S).to(device)
        lengths_N = torch.from_numpy(batch.lengths_N).to(device)
        ends_N = lengths_N.cumsum(0) - 1
        with torch.no_grad():
            rewards_S = torch.from_numpy(batch.rewards_S).to(device)
            # First, because all below uses these statistics. Samples drawn with older statistics are off-policy.
            network.observe_episodes(self.observations_S, discounted_sums(rewards_S, lengths_N, settings.discount))
            rewards_S = network.normalized(rewards_S)
            values_S = network.value(self.observations_S)
            future_N = network.value(torch.from_numpy(batch.last_observations_N).to(device))
            next_values_S = values_S.roll(-1)
            cut_off_N = 1 - torch.from_numpy(batch.terminated_N).to(device).float()
            # Undiscounted returns bootstrapped past a time limit would make never finishing as good as finishing.
            next_values_S[ends_N] = future_N * cut_off_N if settings.discount < 1 else 0.0
            errors_S = rewards_S + settings.discount * next_values_S - values_S
            self.advantages_S = discounted_sums(errors_S, lengths_N, settings.discount * settings.gae_lambda)
            self.returns_S = self.advantages_S + values_S
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


def ppo_loss(
    batch: EpisodeTensors, chosen: Tensor, network: ActorCritic, settings: PpoLossSection
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss over the environment steps `chosen`, and its metrics as sums over them; `_max` are maxima.

        loss = mean(−w · min(r A, clip(r) A)) + value_coefficient · ½ mean(((V − R) / σ)²) − entropy_coefficient · H

    σ is the running spread of returns that the value network keeps, so that the scale of rewards does not matter.
    """
    observations = batch.observations_S[chosen]
    distribution = network.distribution(observations)
    current, old, behaviour = (
        floored(distribution.log_prob(batch.actions_S[chosen])),
        floored(batch.old_S[chosen]),
        floored(batch.sampled_S[chosen]),
    )
    raw_weight = ratio_of(old - behaviour)
    weight = raw_weight.clamp(max=settings.importance_cap)
    advantage = batch.advantages_S[chosen]
    spread = advantage.std(correction=0).maximum(MIN_SPREAD * network.return_std)
    advantage = (advantage - advantage.mean()) / (spread + 1e-8)
    objective, stopped = clipped(ratio_of(current - old), advantage, 1 - settings.clip, 1 + settings.clip)
    errors = (network.value(observations) - batch.returns_S[chosen]) / network.return_std
    value_loss = 0.5 * errors.square().mean()
    entropy = distribution.entropy().mean()
    loss = -(weight * objective).mean() + settings.value_coefficient * value_loss
    loss = loss - settings.entropy_coefficient * entropy
    with torch.no_grad():
        means = {
            "value_loss": value_loss,
            "entropy": entropy,
            "kl_sampling": (raw_weight - 1 - (old - behaviour)).mean(),
            "ratio_mean": raw_weight.mean(),
            "clip_fraction": stopped.mean(),
            "capped_fraction": (raw_weight > settings.importance_cap).float().mean(),
        }
        sums = {name: mean.detach() * len(chosen) for name, mean in means.items()}
    return loss, sums | {"ratio_max": raw_weight.max()}
