"""One optimiser step: micro-batches in, changed weights and metrics out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec
import numpy as np
import torch
from torch import Tensor

from penstock.errors import ConfigError, RunFailed
from penstock.train.loss import (
    CONTROL_METRICS,
    TOKEN_METRICS,
    ControlLossSettings,
    EpisodeBatch,
    EpisodeTensors,
    LossSettings,
    TokenBatch,
    TokenLossSettings,
    TokenTensors,
    control_loss,
    token_loss,
)
from penstock.train.model import ControlPolicy, LanguagePolicy


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


class Learner:
    """Owns the optimiser. Every step is a function of weights, optimiser state, step number and data alone."""

    def __init__(
        self,
        policy: LanguagePolicy | ControlPolicy,
        loss_settings: LossSettings,
        optim_settings: OptimSettings,
        *,
        reference: LanguagePolicy | None = None,
    ) -> None:
        if isinstance(policy, LanguagePolicy) != isinstance(loss_settings, TokenLossSettings):
            raise ConfigError(f"a {type(policy).__name__} cannot be trained with {type(loss_settings).__name__}")
        if isinstance(loss_settings, TokenLossSettings) and loss_settings.kl_coefficient and reference is None:
            raise ConfigError("kl_coefficient is set, but the learner was given no reference policy")
        self.policy = policy
        self.reference = reference
        self.steps = 0
        self._loss = loss_settings
        self._optim = optim_settings
        self._named = {name: p for name, p in policy.module.named_parameters() if p.requires_grad}
        self._parameters = list(self._named.values())
        self._device = self._parameters[0].device
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=optim_settings.learning_rate,
            betas=(optim_settings.beta1, optim_settings.beta2),
            eps=optim_settings.epsilon,
            weight_decay=optim_settings.weight_decay,
        )

    def __repr__(self) -> str:
        return f"<Learner {type(self.policy).__name__} after {self.steps} steps, {len(self._parameters)} tensors>"

    def step(self, micro_batches: Sequence[TokenBatch] | Sequence[EpisodeBatch]) -> dict[str, float]:
        """Train on one batch and return its metrics.

        An empty batch changes nothing but the step number. RunFailed if the loss or the gradient is not finite; the
        weights are then as the last good update left them.
        """
        rate = self.learning_rate(self.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self.policy.module.train()
        if isinstance(self._loss, TokenLossSettings):
            metrics = self._token_step(cast("Sequence[TokenBatch]", micro_batches), self._loss)
        else:
            metrics = self._control_step(cast("Sequence[EpisodeBatch]", micro_batches), self._loss)
        self.steps += 1
        return metrics | {"learning_rate": rate}

    def onload(self, device: torch.device) -> None:
        """Take weights, reference and optimiser state to a device; they may be on it already."""
        self._move(device)

    def offload(self) -> None:
        """Take everything to the host and give the device's memory back, gradients and caches included."""
        self._optimizer.zero_grad(set_to_none=True)
        self._move(torch.device("cpu"))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def device_bytes(self) -> int:
        """Device memory that this process has allocated, whatever for; 0 without a GPU."""
        return sum(torch.cuda.memory_allocated(number) for number in range(torch.cuda.device_count()))

    def _move(self, device: torch.device) -> None:
        if device == self._device:
            return
        for policy in (self.policy, self.reference):
            if policy is not None:
                policy.module.to(device)  # the parameters stay the same objects: the optimiser knows them by identity
        for entries in self._optimizer.state.values():
            for key, tensor in entries.items():
                if key != "step":  # the optimiser keeps this one on the host
                    entries[key] = tensor.to(device)
        self._device = device

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

    def _token_step(self, batches: Sequence[TokenBatch], settings: TokenLossSettings) -> dict[str, float]:
        prepared = [TokenTensors(batch, self._device) for batch in batches]
        prepared = [batch for batch in prepared if batch.tokens]
        if not prepared:
            return {"tokens": 0.0, "sequences": 0.0}
        module = self.policy.module
        updates = min(self._optim.minibatches, len(prepared))
        single_update = self._optim.epochs * updates == 1
        proximal: list[Tensor | None] = [None] * len(prepared)
        reference: list[Tensor | None] = [None] * len(prepared)
        with torch.no_grad():
            if not single_update:
                proximal = [batch.logprobs(module, settings.temperature) for batch in prepared]
            if self.reference is not None and settings.kl_coefficient:
                reference = [batch.logprobs(self.reference.module, settings.temperature) for batch in prepared]
        sums: list[Tensor] = []
        grad_norms: list[float] = []
        for epoch in range(self._optim.epochs):
            order = np.arange(len(prepared)) if single_update else self._order(len(prepared), epoch)
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
                        proximal_M=proximal[i],
                        reference_M=reference[i],
                    )
                    loss.backward()
                    sums.append(metrics)
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

    def _control_step(self, batches: Sequence[EpisodeBatch], settings: ControlLossSettings) -> dict[str, float]:
        assert isinstance(self.policy, ControlPolicy)
        network = self.policy.network
        if not batches:
            return {"tokens": 0.0, "sequences": 0.0}
        if len(batches) != 1:
            raise RunFailed(f"a gymnasium step takes all its episodes in one batch; {len(batches)} were given")
        batch = EpisodeTensors(batches[0], network, settings, self._device)
        rows: list[Tensor] = []
        grad_norms: list[float] = []
        for epoch in range(self._optim.epochs):
            order = torch.from_numpy(self._order(batch.steps, epoch)).to(self._device)
            for chosen in order.tensor_split(min(self._optim.minibatches, batch.steps)):
                loss, metrics = control_loss(batch, chosen, network, settings)
                loss.backward()
                rows.append(metrics)
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
