"""The optimiser of a policy: its class, its parameter groups, its learning rate, and float32 masters.

A policy in bfloat16 is trained through float32 copies of its parameters: gradients are summed in them, the optimiser
changes them, and after each update the policy is given what they round to. A step of 1e-6 is far below what bfloat16
resolves; without masters it is lost.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.errors import ConfigError
from penstock.runtime.named import load_callable
from penstock.train.settings import OptimizerSection


class Optimizer:
    """Changes the trained parameters of a module, by name."""

    def __init__(self, module: nn.Module, settings: OptimizerSection) -> None:
        self._settings = settings
        self._working = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._masters = {name: _master(p) for name, p in self._working.items() if p.dtype != torch.float32}
        self._trained: dict[str, Tensor] = {**self._working, **self._masters}
        self._inner = _build(self._trained, settings)

    @property
    def parameters(self) -> list[Tensor]:
        """What gradients are summed in."""
        return list(self._trained.values())

    def clip(self) -> float:
        """Shortens the gradient; its norm before."""
        norm = nn.utils.clip_grad_norm_(self.parameters, self._settings.max_grad_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def update(self, rate: float) -> None:
        for group in self._inner.param_groups:
            group["lr"] = rate
        self._inner.step()
        self._round()
        self.zero_grad()

    def zero_grad(self) -> None:
        for parameter in (*self._working.values(), *self._masters.values()):
            parameter.grad = None

    def to(self, device: torch.device) -> None:
        """The optimiser's own memory; the policy's is moved with the policy."""
        for master in self._masters.values():
            master.data = master.data.to(device)
        for entries in self._inner.state.values():
            for key, value in entries.items():
                if isinstance(value, Tensor) and key != "step":  # the optimiser keeps this one on the host
                    entries[key] = value.to(device)

    def state(self) -> dict[str, Tensor]:
        """Live tensors by name, `<entry>/<parameter>`."""
        tensors = {f"master/{name}": master.detach() for name, master in self._masters.items()}
        for name, parameter in self._trained.items():
            for key, value in self._inner.state.get(parameter, {}).items():
                tensors[f"{key}/{name}"] = value if isinstance(value, Tensor) else torch.tensor(value)
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on where `state` was taken. Masters that it lacks are made from the policy, which is restored already."""
        unknown = sorted(entry for entry in tensors if entry.partition("/")[2] not in self._trained)
        if unknown:
            raise ConfigError(f"this optimiser state belongs to another model: unknown entries {unknown[:3]}")
        self._inner.state.clear()
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(self._working[name])
        for entry, tensor in tensors.items():
            key, _, name = entry.partition("/")
            if key != "master":
                self._inner.state[self._trained[name]][key] = tensor.clone()
            elif name in self._masters:
                self._masters[name].data.copy_(tensor)

    @torch.no_grad()
    def _round(self) -> None:
        if self._masters:
            working: list[Tensor] = [self._working[name] for name in self._masters]
            torch._foreach_copy_(working, list(self._masters.values()))  # pyright: ignore[reportPrivateImportUsage]


def _master(parameter: nn.Parameter) -> Tensor:
    """A float32 copy that the gradients of `parameter` go to, as soon as each is complete."""
    master = parameter.detach().float().requires_grad_()

    def hand_over(source: Tensor) -> None:
        assert source.grad is not None
        if master.grad is None:
            master.grad = source.grad.float()
        else:
            master.grad += source.grad
        source.grad = None

    parameter.register_post_accumulate_grad_hook(hand_over)
    return master


def _build(trained: Mapping[str, Tensor], settings: OptimizerSection) -> torch.optim.Optimizer:
    chosen = load_callable("optimizer", settings.name)
    offered = {
        "lr": settings.learning_rate,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.epsilon,
        "weight_decay": settings.weight_decay,
    }
    taken = inspect.signature(chosen).parameters
    options = {key: value for key, value in offered.items() if key in taken} | settings.options
    groups = [
        {"params": [p for p in trained.values() if p.ndim > 1]},
        {"params": [p for p in trained.values() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if "weight_decay" not in taken:
        groups = [{"params": list(trained.values())}]
    try:
        return chosen([group for group in groups if group["params"]], **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer {settings.name!r} cannot be made with {options}: {error}") from error


def learning_rate(settings: OptimizerSection, step: int, steps: int) -> float:
    """Of that step of so many. A function of the step alone: to resume needs no state."""
    fraction = min(1.0, (step + 1) / (settings.warmup_steps + 1))
    progress = min(1.0, step / (settings.decay_steps or steps))
    if settings.schedule == "linear":
        fraction *= 1.0 - progress * (1.0 - settings.final_fraction)
    elif settings.schedule == "cosine":
        fraction *= settings.final_fraction + (1.0 - settings.final_fraction) * (1.0 + math.cos(math.pi * progress)) / 2
    return settings.learning_rate * fraction
