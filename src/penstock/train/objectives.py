"""The objective of a step, for language models and for gymnasium policies: from micro-batches to losses with gradients.

An objective prepares the batch of a step as *work*: units that an epoch visits in random order (micro-batches, or
environment steps), cut into the minibatches of its updates.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeGuard, get_args

import msgspec
import numpy as np
import torch
from torch import Tensor

from penstock.batch.pack import Packing, TokenMicroBatch, TrajectoryBatch, halved
from penstock.engines.fused import fuse
from penstock.engines.models import ActorCriticPolicy, LanguagePolicy, Policy
from penstock.errors import ConfigError, RunFailed
from penstock.train.attention import attend_in_forests
from penstock.train.losses.ppo import EpisodeTensors, ppo_loss
from penstock.train.losses.tokens import Average, TokenLoss, Tokens, divergence, floored, ratio_of, resolve
from penstock.train.scores import TokenTensors
from penstock.train.settings import PpoLossSection, TokenLossSection, TrainSection
from penstock.train.sharding import ShardedPolicy, idle_pass

log = logging.getLogger(__name__)

Part = Literal["policy", "optimizer", "reference"]
"""The parts of a learner that move between device and host separately. A teacher moves with the reference."""
PARTS: tuple[Part, ...] = get_args(Part)
HOST = torch.device("cpu")

Metrics = dict[str, Tensor]
"""Sums over tokens or environment steps; one whose name ends in `_max` is a maximum."""


class PriorLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a micro-batch's trained tokens before the step's first update, in host memory."""

    reference_M: Tensor | None = None
    old_M: Tensor | None = None
    teacher_M: Tensor | None = None


class Totals(msgspec.Struct, frozen=True):
    """The counts that an update is averaged over."""

    tokens: float = 0.0
    """Trained tokens, or environment steps."""
    samples: float = 0.0
    """All samples, also those of which no token is trained: masking some does not weigh up the others."""


class Work(Protocol):
    """The batch of a step on the device."""

    units: int
    """The number of units in an epoch; 0 if there is nothing to train on."""
    totals: Totals
    """Totals of the whole batch."""

    def totals_of(self, chosen: np.ndarray) -> Totals:
        """Totals of one update."""
        ...

    def shrink(self) -> None:
        """Reduces the memory of passes, after the last one ran out of device memory."""
        ...

    def losses(self, chosen: np.ndarray, totals: Totals) -> Iterator[tuple[Tensor, Metrics]]:
        """The shares of one update's loss, one for each forward pass. Call `backward` on each before the next."""
        ...


class Objective(Protocol):
    """Computes the losses of a policy."""

    policy: Any
    reference: LanguagePolicy | None
    teacher: LanguagePolicy | None
    packing: Packing
    """The layout of its micro-batches."""

    def scored_by(self, several_updates: bool) -> tuple[Part, ...]: ...

    def score(self, batches: Sequence[Any], several_updates: bool) -> Iterator[PriorLogprobs]: ...

    def prepare(self, batches: Sequence[Any], scores: Sequence[PriorLogprobs], device: torch.device) -> Work: ...

    cut: bool
    """Whether samples are drawn from the most likely tokens only, which makes these more probable."""

    def differences(self, batches: Sequence[Any]) -> Tensor:
        """The policy's log-probabilities of what was drawn, minus those that the samples carry. In host memory."""
        ...


class TokenObjective:
    """A language model trained by `loss`, with the terms that all losses share: entropy bonus, divergence, average."""

    def __init__(
        self,
        policy: Policy,
        settings: TokenLossSection = TokenLossSection(),
        *,
        packing: Packing,
        loss: str = TrainSection().loss,
        temperature: float = 1.0,
        longest: int = 1,
        may_recompute: bool = True,
        reference: LanguagePolicy | None = None,
        teacher: LanguagePolicy | None = None,
        cut: bool = False,
    ) -> None:
        """`temperature` is that of the sampling: samples carry the log-probabilities of the tempered policy.

        `cut`: they were drawn with `top_k`, `top_p` or `min_p`.

        With `may_recompute`, activations that do not fit into the device's memory are recomputed from then on.
        """
        if not isinstance(policy, LanguagePolicy):
            raise ConfigError(f"a {type(policy).__name__} cannot be trained with a loss over tokens")
        if settings.kl_coefficient and reference is None:
            raise ConfigError("kl_coefficient is set, but there is no reference policy")
        if loss == "distill" and teacher is None:
            raise ConfigError("loss 'distill' needs a teacher: set train.teacher to the directory of a model")
        if teacher is not None and teacher.tokenizer.vocabulary() != policy.tokenizer.vocabulary():
            raise ConfigError(_vocabulary_mismatch(policy.tokenizer.vocabulary(), teacher.tokenizer.vocabulary()))
        self.policy = policy
        self.reference = reference
        self.teacher = teacher
        self.settings = settings
        self.temperature = temperature
        self.cut = cut
        self.loss: TokenLoss
        self.average: Average
        self.loss, own_average = resolve(loss)
        self.average = settings.average or own_average
        self.constant_length = settings.constant_length or longest
        self.packing: Packing = packing
        models = [one.module for one in (policy, reference, teacher) if one is not None]
        if packing != "padded" and not all(attend_in_forests(module) for module in models):
            log.info("this model cannot process several sequences per row: it is trained with padding")
            self.packing = "padded"
        for module in models:
            fuse(module)
        self._may_recompute = may_recompute
        self.limit_tokens: int | None = None
        """Tokens of a pass that are expected to fit into device memory."""

    def scored_by(self, several_updates: bool) -> tuple[Part, ...]:
        policy: tuple[Part, ...] = ("policy",) if several_updates else ()
        return (*policy, "reference") if self.settings.kl_coefficient or self.teacher is not None else policy

    def score(self, batches: Sequence[TokenMicroBatch], several_updates: bool) -> Iterator[PriorLogprobs]:
        for batch in batches:
            reference_M = self._logprobs(batch, self.reference) if self.settings.kl_coefficient else None
            old_M = self._logprobs(batch, self.policy) if several_updates else None
            yield PriorLogprobs(reference_M, old_M, self._logprobs(batch, self.teacher))

    def prepare(
        self, batches: Sequence[TokenMicroBatch | None], scores: Sequence[PriorLogprobs], device: torch.device
    ) -> TokenWork:
        return TokenWork(self, batches, scores, device)

    def differences(self, batches: Sequence[TokenMicroBatch]) -> Tensor:
        """See `Objective.differences`."""
        found = [torch.empty(0)]
        for batch in batches:
            own_M = self._logprobs(batch, self.policy)
            if own_M is not None:
                found.append(own_M - torch.from_numpy(batch.logprobs_RT[np.nonzero(batch.loss_mask_RT)]))
        return torch.cat(found)

    def recompute(self, tokens: int) -> bool:
        """Recomputes activations from now on: passes of `tokens` tokens do not fit into device memory. False if they
        are recomputed already, or must not be."""
        if not self._may_recompute or self.policy.recomputes:
            return False
        log.warning(
            "out of device memory with %d tokens in a micro-batch: recomputing activations from now on. Set "
            "train.activation_checkpointing = true to save the attempt",
            tokens,
        )
        self.policy.checkpoint_activations()
        self.policy.prepare_training()
        return True

    def fit(self, tokens: int) -> None:
        """Halves passes from now on: `tokens` tokens do not fit into device memory."""
        self.limit_tokens = max(1, tokens // 2)
        log.warning(
            "out of device memory with %d tokens in a micro-batch: continuing with at most %d. Set "
            "train.tokens_per_micro_batch to this to save the attempts",
            tokens,
            self.limit_tokens,
        )

    def _logprobs(self, batch: TokenMicroBatch, policy: LanguagePolicy | None) -> Tensor | None:
        """In host memory."""
        if policy is None:
            return None
        if not _trains(batch):
            if isinstance(policy, ShardedPolicy):
                with policy.evaluating(), torch.no_grad():
                    idle_pass(policy.module)
            return None
        device = next(policy.module.parameters()).device
        with policy.evaluating(), torch.no_grad():
            return TokenTensors(batch, device).scores(policy.module, self.temperature)[0].to(HOST)

    def share(self, batch: TokenTensors, score: PriorLogprobs, totals: Totals) -> tuple[Tensor, Metrics]:
        """A micro-batch's share of the loss of an update."""
        settings = self.settings
        logprobs_M, entropy_M = batch.scores(self.policy.module, self.temperature)
        current_M, behaviour_M = floored(logprobs_M), floored(batch.behaviour_M)
        old_M = current_M.detach() if score.old_M is None else floored(score.old_M.to(current_M.device))
        tokens = Tokens(
            current_M,
            old_M,
            behaviour_M,
            batch.advantage_M,
            batch.sequence_M,
            batch.sequences,
            None if score.teacher_M is None else floored(score.teacher_M.to(current_M.device)),
        )
        loss_M, metrics = self.loss(tokens, settings)
        if settings.entropy_coefficient:
            loss_M = loss_M - settings.entropy_coefficient * entropy_M
        if score.reference_M is not None:
            divergence_M = divergence(current_M, floored(score.reference_M.to(current_M.device)))
            loss_M = loss_M + settings.kl_coefficient * divergence_M
            metrics = metrics | {"kl_reference": divergence_M.sum()}
        if self.average == "token":
            loss = loss_M.sum() / totals.tokens
        elif self.average == "sequence":
            loss = (loss_M / batch.sample_tokens_M).sum() / totals.samples
        else:
            loss = loss_M.sum() / (totals.samples * self.constant_length)
        with torch.no_grad():
            log_weight_M = old_M - behaviour_M
            weight_M = ratio_of(log_weight_M)
            metrics = metrics | {
                "entropy": entropy_M.sum(),
                "kl_sampling": (weight_M - 1 - log_weight_M).sum(),
                "ratio_mean": weight_M.sum(),
                "ratio_max": weight_M.max(),
            }
        return loss, {name: value.detach() for name, value in metrics.items()}


class TokenWork:
    """Units are micro-batches."""

    def __init__(
        self,
        objective: TokenObjective,
        batches: Sequence[TokenMicroBatch | None],
        scores: Sequence[PriorLogprobs],
        device: torch.device,
    ) -> None:
        self._objective = objective
        self._device = device
        self._computing: TokenMicroBatch | None = None
        """The part that is being computed."""
        self._sharded = isinstance(objective.policy, ShardedPolicy)
        self._counts = [Totals() if b is None else Totals(float(b.trained_tokens_N.sum()), b.samples) for b in batches]
        """Of each unit."""
        pairs = zip(batches, scores, strict=True)
        self._scored = [[(batch, score)] if _trains(batch) else [] for batch, score in pairs]
        """For each unit, the parts that are computed in sequence; empty if there is nothing to train on."""
        self._split()
        self.units = len(self._scored)
        self.totals = self.totals_of(np.arange(self.units))

    def totals_of(self, chosen: np.ndarray) -> Totals:
        counts = [self._counts[i] for i in chosen]
        return Totals(sum(one.tokens for one in counts), sum(one.samples for one in counts))

    def losses(self, chosen: np.ndarray, totals: Totals) -> Iterator[tuple[Tensor, Metrics]]:
        for i in chosen:
            if not self._scored[i] and self._sharded:
                yield idle_pass(self._objective.policy.module), {}
            for batch, score in self._scored[i]:
                self._computing = batch
                yield self._objective.share(TokenTensors(batch, self._device), score, totals)

    def shrink(self) -> None:
        failed = self._computing
        assert failed is not None
        tokens = failed.token_ids_RT.size
        if self._objective.recompute(tokens):
            return
        self._objective.fit(tokens)
        self._split()
        if any(batch is failed for unit in self._scored for batch, _ in unit):
            advice = "" if self._objective.policy.recomputes else "set train.activation_checkpointing = true, or "
            raise RunFailed(
                f"a single sequence of {tokens} tokens does not fit into the device's memory: {advice}train shorter "
                "sequences"
            )

    def _split(self) -> None:
        """Splits parts that exceed the limit, as far as they can be split."""
        limit = self._objective.limit_tokens
        if limit is not None:
            self._scored = [[part for one in unit for part in _pieces(*one, limit)] for unit in self._scored]


def _pieces(batch: TokenMicroBatch, score: PriorLogprobs, limit: int) -> list[tuple[TokenMicroBatch, PriorLogprobs]]:
    """The micro-batch in parts of at most `limit` tokens, as far as it can be split."""
    parts = halved(batch) if batch.token_ids_RT.size > limit else []
    if len(parts) < 2:
        return [(batch, score)]
    found: list[tuple[TokenMicroBatch, PriorLogprobs]] = []
    for part, chosen in parts:
        if len(chosen):
            priors = score.reference_M, score.old_M, score.teacher_M
            selected = (None if one is None else one[chosen] for one in priors)
            found += _pieces(part, PriorLogprobs(*selected), limit)
    return found


def _trains(batch: TokenMicroBatch | None) -> TypeGuard[TokenMicroBatch]:
    """Whether it has a trained token; a rank with fewer micro-batches than others has None in their place."""
    return batch is not None and bool(batch.loss_mask_RT.any())


def _vocabulary_mismatch(student: Mapping[str, int], teacher: Mapping[str, int]) -> str:
    differing = sorted(student.items() ^ teacher.items())
    return (
        f"the teacher's vocabulary of {len(teacher)} tokens is not the student's of {len(student)}: {len(differing)} "
        f"entries differ, the first is {differing[0][0]!r}. A token must mean the same to both: use a teacher of the "
        "same family"
    )


class EpisodeObjective:
    """A gymnasium policy trained by PPO."""

    reference: LanguagePolicy | None = None
    teacher: LanguagePolicy | None = None
    packing: Packing = "padded"
    cut = False

    def __init__(self, policy: Policy, settings: PpoLossSection = PpoLossSection()) -> None:
        if not isinstance(policy, ActorCriticPolicy):
            raise ConfigError(f"a {type(policy).__name__} cannot be trained with a loss over episodes")
        self.policy = policy
        self.settings = settings

    def scored_by(self, several_updates: bool) -> tuple[Part, ...]:
        return ()

    def score(self, batches: Sequence[TrajectoryBatch], several_updates: bool) -> Iterator[PriorLogprobs]:
        return iter([PriorLogprobs()] * len(batches))

    def prepare(
        self, batches: Sequence[TrajectoryBatch], scores: Sequence[PriorLogprobs], device: torch.device
    ) -> EpisodeWork:
        if len(batches) > 1:
            raise RunFailed(f"a gymnasium step takes all its episodes in one batch; {len(batches)} were given")
        return EpisodeWork(self, batches, device)

    def differences(self, batches: Sequence[TrajectoryBatch]) -> Tensor:
        """See `Objective.differences`."""
        found = [torch.empty(0)]
        device = next(self.policy.network.parameters()).device
        for batch in batches:
            observations_S, actions_S = (
                torch.from_numpy(one).to(device) for one in (batch.observations_S, batch.actions_S)
            )
            with torch.no_grad():
                own_S = self.policy.network.distribution(observations_S).log_prob(actions_S)
            found.append(own_S.to(HOST) - torch.from_numpy(batch.logprobs_S))
        return torch.cat(found)


class EpisodeWork:
    """Units are environment steps."""

    def __init__(self, objective: EpisodeObjective, batches: Sequence[TrajectoryBatch], device: torch.device) -> None:
        self._objective = objective
        self.units = 0
        self.totals = Totals()
        if batches:
            network = objective.policy.network
            self._batch = EpisodeTensors(batches[0], network, objective.settings, device)
            network.observe_returns(self._batch.returns_S)
            self.units = self._batch.steps
            self.totals = Totals(float(self.units), float(len(batches[0].lengths_N)))

    def totals_of(self, chosen: np.ndarray) -> Totals:
        return Totals(float(len(chosen)), self.totals.samples)

    def shrink(self) -> None:
        raise RunFailed("the episodes of a step do not fit into the device's memory: lower train.groups_per_step")

    def losses(self, chosen: np.ndarray, totals: Totals) -> Iterator[tuple[Tensor, Metrics]]:
        network = self._objective.policy.network
        rows = torch.from_numpy(chosen).to(self._batch.returns_S.device)
        yield ppo_loss(self._batch, rows, network, self._objective.settings)
