"""One optimiser step: micro-batches in, changed weights and metrics out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, cast, get_args

import msgspec
import numpy as np
import torch
from torch import Tensor

from penstock.engines.models import ActorCriticPolicy, LanguagePolicy
from penstock.errors import ConfigError, RunFailed
from penstock.runtime.tensors import free_device_caches
from penstock.train.loss import (
    CONTROL_METRICS,
    TOKEN_METRICS,
    EpisodeBatch,
    EpisodeTensors,
    LossSettings,
    PpoLossSettings,
    TokenBatch,
    TokenLossSettings,
    TokenTensors,
    ppo_loss,
    token_loss,
)


class OptimSettings(msgspec.Struct, frozen=True):
    """AdamW and how a step uses it."""

    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    warmup_steps: int = 0
    decay_steps: int = 0
    """The learning rate falls in a line to `final_fraction` of itself over this many steps; 0: it does not fall."""
    final_fraction: float = 0.1
    epochs: int = 1
    """How often a step goes over its batch."""
    minibatches: int = 1
    """Updates per epoch."""
    seed: int = 0
    """Of the order in which environment steps are visited."""


Part = Literal["policy", "optimizer", "reference"]
"""What of a learner can be on a device or on the host by itself."""
PARTS: tuple[Part, ...] = get_args(Part)
HOST = torch.device("cpu")


class PriorLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a micro-batch's trained tokens before the step's first update, in host memory."""

    reference_M: Tensor | None = None
    old_M: Tensor | None = None


class Learner:
    """Owns the optimiser. Every step is a function of weights, optimiser state, step number and data alone.

    A step has two phases that need not share the device: `score` asks the reference, and the policy as it is before the
    first update; `step` trains the policy.
    """

    def __init__(
        self,
        policy: LanguagePolicy | ActorCriticPolicy,
        loss_settings: LossSettings,
        optim_settings: OptimSettings,
        *,
        reference: LanguagePolicy | None = None,
        progressed: Callable[[str], None] = lambda doing: None,
    ) -> None:
        """`progressed` is told of every micro-batch: a long step is no standstill."""
        if isinstance(policy, LanguagePolicy) != isinstance(loss_settings, TokenLossSettings):
            raise ConfigError(f"a {type(policy).__name__} cannot be trained with {type(loss_settings).__name__}")
        if isinstance(loss_settings, TokenLossSettings) and loss_settings.kl_coefficient and reference is None:
            raise ConfigError("kl_coefficient is set, but the learner was given no reference policy")
        self.policy = policy
        self.reference = reference
        self.steps = 0
        self._progressed = progressed
        self._loss = loss_settings
        self._optim = optim_settings
        self._named = {name: p for name, p in policy.module.named_parameters() if p.requires_grad}
        self._parameters = list(self._named.values())
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=optim_settings.learning_rate,
            betas=(optim_settings.beta1, optim_settings.beta2),
            eps=optim_settings.epsilon,
            weight_decay=optim_settings.weight_decay,
        )

    def __repr__(self) -> str:
        return f"<Learner {type(self.policy).__name__} after {self.steps} steps, {len(self._parameters)} tensors>"

    @property
    def scored_by(self) -> tuple[Part, ...]:
        """What `score` needs on the device; empty when a step compares with nothing but the samples."""
        needed: list[Part] = []
        if isinstance(self._loss, TokenLossSettings):
            if self._several_updates(self._optim.minibatches):
                needed.append("policy")
            if self._loss.kl_coefficient:
                needed.append("reference")
        return tuple(needed)

    def score(self, micro_batches: Sequence[TokenBatch] | Sequence[EpisodeBatch]) -> list[PriorLogprobs]:
        """What a step over this batch compares with, one for each micro-batch. Changes nothing."""
        settings = self._loss
        if not isinstance(settings, TokenLossSettings):
            return [PriorLogprobs()] * len(micro_batches)
        batches = cast("Sequence[TokenBatch]", micro_batches)
        several = self._several_updates(sum(bool(batch.loss_mask_RT.any()) for batch in batches))
        old = self.policy if several else None
        reference = self.reference if settings.kl_coefficient else None
        self.policy.module.train()
        scores: list[PriorLogprobs] = []
        for batch in batches:
            reference_M = _logprobs(batch, reference, settings.temperature)
            scores.append(PriorLogprobs(reference_M, _logprobs(batch, old, settings.temperature)))
            self._progressed(f"scoring step {self.steps}: {len(scores)} of {len(batches)} micro-batches")
        return scores

    def step(
        self,
        micro_batches: Sequence[TokenBatch] | Sequence[EpisodeBatch],
        scores: Sequence[PriorLogprobs] | None = None,
    ) -> dict[str, float]:
        """Train on one batch and return its metrics. Without `scores` it is scored first.

        An empty batch changes nothing but the step number. RunFailed if the loss or the gradient is not finite; the
        weights are then as the last good update left them.
        """
        if scores is None:
            scores = self.score(micro_batches)
        rate = self.learning_rate(self.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self.policy.module.train()
        if isinstance(self._loss, TokenLossSettings):
            metrics = self._token_step(cast("Sequence[TokenBatch]", micro_batches), scores, self._loss)
        else:
            metrics = self._control_step(cast("Sequence[EpisodeBatch]", micro_batches), self._loss)
        self.steps += 1
        return metrics | {"learning_rate": rate}

    def onload(self, device: torch.device, parts: Iterable[Part] = PARTS) -> None:
        """Take these parts to a device; they may be on it already. The others stay where they are."""
        for part in parts:
            self._move(part, device)

    def offload(self) -> None:
        """Take everything to the host and give the device's memory back, gradients and caches included."""
        self._optimizer.zero_grad(set_to_none=True)
        self.onload(HOST)
        free_device_caches()

    def _move(self, part: Part, device: torch.device) -> None:
        if part == "policy":
            self.policy.module.to(device)  # the parameters stay the same objects: the optimiser knows them by identity
        elif part == "reference" and self.reference is not None:
            self.reference.module.to(device)
        elif part == "optimizer":
            for entries in self._optimizer.state.values():
                for key, tensor in entries.items():
                    if key != "step":  # the optimiser keeps this one on the host
                        entries[key] = tensor.to(device)

    def _several_updates(self, batches: int) -> bool:
        return self._optim.epochs * min(self._optim.minibatches, batches) > 1

    def learning_rate(self, step: int) -> float:
        """Of that step."""
        settings = self._optim
        fraction = min(1.0, (step + 1) / (settings.warmup_steps + 1))
        if settings.decay_steps:
            progress = min(1.0, step / settings.decay_steps)
            fraction *= 1.0 - progress * (1.0 - settings.final_fraction)
        return settings.learning_rate * fraction

    def state(self) -> dict[str, Tensor]:
        """Live optimiser tensors and the step number, by name: all that `load_state` needs to go on exactly."""
        tensors: dict[str, Tensor] = {"steps": torch.tensor(self.steps)}
        for name, parameter in self._named.items():
            for key, tensor in self._optimizer.state.get(parameter, {}).items():
                tensors[f"{key}/{name}"] = tensor
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on where `state` was taken. The policy's tensors are restored separately."""
        known = {f"{key}/{name}" for name in self._named for key in ("step", "exp_avg", "exp_avg_sq")}
        unknown = sorted(tensors.keys() - known - {"steps"})
        if unknown or "steps" not in tensors:
            raise ConfigError(f"this optimiser state belongs to another model: unknown entries {unknown[:3]}")
        self.steps = int(tensors["steps"])
        self._optimizer.state.clear()
        for entry, tensor in tensors.items():
            if entry != "steps":
                key, _, name = entry.partition("/")
                self._optimizer.state[self._named[name]][key] = tensor.clone()

    def _token_step(
        self, batches: Sequence[TokenBatch], scores: Sequence[PriorLogprobs], settings: TokenLossSettings
    ) -> dict[str, float]:
        module, device = self.policy.module, self._parameters[0].device
        scored = [(TokenTensors(batch, device), score) for batch, score in zip(batches, scores, strict=True)]
        prepared = [batch for batch, _ in scored if batch.tokens]
        if not prepared:
            return {"tokens": 0.0, "sequences": 0.0}
        reference = [_on(device, score.reference_M) for batch, score in scored if batch.tokens]
        old = [_on(device, score.old_M) for batch, score in scored if batch.tokens]
        updates = min(self._optim.minibatches, len(prepared))
        several = self._several_updates(len(prepared))
        sums: list[Tensor] = []
        grad_norms: list[float] = []
        for epoch in range(self._optim.epochs):
            order = self._order(len(prepared), epoch) if several else np.arange(len(prepared))
            for chosen in np.array_split(order, updates):
                tokens = sum(prepared[i].tokens for i in chosen)
                sequences = sum(prepared[i].sequences for i in chosen)
                for i in chosen:
                    loss, metrics = token_loss(
                        prepared[i],
                        module,
                        settings,
                        total_tokens=tokens,
                        total_sequences=sequences,
                        old_M=old[i],
                        reference_M=reference[i],
                    )
                    loss.backward()
                    sums.append(metrics)
                    done, of = len(sums), len(prepared) * self._optim.epochs
                    self._progressed(f"training step {self.steps}: {done} of {of} micro-batches")
                grad_norms.append(self._update(sums[-len(chosen) :]))
        stacked = torch.stack(sums)
        total = sum(batch.tokens for batch in prepared) * self._optim.epochs
        values = stacked.sum(0).tolist()
        metrics = {name: value / total for name, value in zip(TOKEN_METRICS, values[:-1], strict=True)}
        metrics["loss"] = values[0] / len(grad_norms)
        return metrics | {
            "ratio_max": float(stacked[:, -1].max()),
            "grad_norm": sum(grad_norms) / len(grad_norms),
            "tokens": float(sum(batch.tokens for batch in prepared)),
            "sequences": float(sum(batch.sequences for batch in prepared)),
            "updates": float(len(grad_norms)),
        }

    def _control_step(self, batches: Sequence[EpisodeBatch], settings: PpoLossSettings) -> dict[str, float]:
        assert isinstance(self.policy, ActorCriticPolicy)
        network = self.policy.network
        if not batches:
            return {"tokens": 0.0, "sequences": 0.0}
        if len(batches) != 1:
            raise RunFailed(f"a gymnasium step takes all its episodes in one batch; {len(batches)} were given")
        device = self._parameters[0].device
        batch = EpisodeTensors(batches[0], network, settings, device)
        rows: list[Tensor] = []
        grad_norms: list[float] = []
        for epoch in range(self._optim.epochs):
            order = torch.from_numpy(self._order(batch.steps, epoch)).to(device)
            for chosen in order.tensor_split(min(self._optim.minibatches, batch.steps)):
                loss, metrics = ppo_loss(batch, chosen, network, settings)
                loss.backward()
                rows.append(metrics)
                self._progressed(f"training step {self.steps}: epoch {epoch + 1} of {self._optim.epochs}")
                grad_norms.append(self._update([metrics]))
        stacked = torch.stack(rows)
        means = stacked[:, :-1].mean(0).tolist()
        return dict(zip(CONTROL_METRICS, means, strict=True)) | {
            "ratio_max": float(stacked[:, -1].max()),
            "grad_norm": sum(grad_norms) / len(grad_norms),
            "tokens": float(batch.steps),
            "sequences": float(len(batches[0].lengths_N)),
            "updates": float(len(grad_norms)),
        }

    def _order(self, size: int, epoch: int) -> np.ndarray:
        """A fresh permutation, the same again after a resume."""
        return np.random.default_rng((self._optim.seed, self.steps, epoch)).permutation(size)

    def _update(self, metrics: list[Tensor]) -> float:
        """Clip, check and apply the gradient; the norm before clipping."""
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._optim.max_grad_norm))
        loss = sum(float(row[0]) for row in metrics)
        if not (math.isfinite(norm) and math.isfinite(loss)):
            self._optimizer.zero_grad(set_to_none=True)
            raise RunFailed(
                f"training step {self.steps} gave loss {loss:g}, gradient norm {norm:g}: the update was not applied. "
                "Lower the learning rate or look for extreme rewards, then resume from the last checkpoint"
            )
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm


def _logprobs(
    batch: TokenBatch, policy: LanguagePolicy | ActorCriticPolicy | None, temperature: float
) -> Tensor | None:
    """On the host; None if nobody is asked."""
    if policy is None or not batch.loss_mask_RT.any():
        return None
    device = next(policy.module.parameters()).device
    with torch.no_grad():
        return TokenTensors(batch, device).logprobs(policy.module, temperature).to(HOST)


def _on(device: torch.device, scores_M: Tensor | None) -> Tensor | None:
    return None if scores_M is None else scores_M.to(device)
