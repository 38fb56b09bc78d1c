"""The optimiser of a policy: its class, its parameter groups, its learning rate, and float32 masters.

A policy in bfloat16 is trained through float32 copies of its parameters: gradients are summed in float32, the optimiser
updates the copies, and after each update the policy receives their rounded values. A step of 1e-6 is far below the
resolution of bfloat16; without masters it is lost.

With `offload` the masters and the optimiser's state stay in host memory, and the update is computed there, one
parameter at a time: the device holds the policy and its gradient.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.errors import ConfigError
from penstock.runtime.named import load_callable
from penstock.train.settings import OptimizerSection

FUSED = (torch.optim.Adam, torch.optim.AdamW)
"""Classes that update all parameters in one pass, without temporary copies of them, on CPUs and GPUs."""


class Optimizer:
    """Updates the trained parameters of a module, by name."""

    def __init__(self, module: nn.Module, settings: OptimizerSection) -> None:
        self._settings = settings
        self._offload = settings.offload
        self._working = {name: p for name, p in module.named_parameters() if p.requires_grad}
        through = {name: p for name, p in self._working.items() if self._offload or p.dtype != torch.float32}
        home = torch.device("cpu") if self._offload else None
        self._masters = {name: p.detach().to(home, torch.float32, copy=True) for name, p in through.items()}
        self._trained: dict[str, Tensor] = {**self._working, **self._masters}
        self._sums: dict[str, Tensor] = {}
        """Gradients of the parameters with masters, on the device of the policy."""
        for name, parameter in through.items():
            parameter.register_post_accumulate_grad_hook(partial(_add_to, self._sums, name))
        self._inner = _build(self._trained, settings)

    def clip(self) -> float:
        """Clips the gradient; returns its norm before."""
        found = (self._sums.get(name, parameter.grad) for name, parameter in self._working.items())
        gradients = [gradient for gradient in found if gradient is not None]
        norm = nn.utils.get_total_norm(gradients)
        length = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if length > self._settings.max_grad_norm:
            shorter = self._settings.max_grad_norm / (length + 1e-6)
            torch._foreach_mul_(gradients, shorter)  # pyright: ignore[reportPrivateImportUsage]
        return length

    def update(self, rate: float) -> None:
        for group in self._inner.param_groups:
            group["lr"] = rate
        if self._offload:
            for name in [*self._sums]:
                self._move_gradient(name)
                self._inner.step()  # updates this parameter: no other has a gradient
                self._round([name])
        else:
            for name in [*self._sums]:
                self._move_gradient(name)
            self._inner.step()
            self._round([*self._masters])
        self.zero_grad()

    def _move_gradient(self, name: str) -> None:
        master = self._masters[name]
        master.grad = self._sums.pop(name).to(master.device)

    def zero_grad(self) -> None:
        self._sums.clear()
        for parameter in (*self._working.values(), *self._masters.values()):
            parameter.grad = None

    def to(self, device: torch.device) -> None:
        """Moves the optimiser's tensors, unless they stay on the host. The policy is moved separately."""
        if self._offload:
            return
        for master in self._masters.values():
            master.data = master.data.to(device)
        fused = any(group.get("fused") for group in self._inner.param_groups)
        for entries in self._inner.state.values():
            for key, value in entries.items():
                if isinstance(value, Tensor) and (fused or key != "step"):  # else it is kept on the host
                    entries[key] = value.to(device)

    def state(self) -> dict[str, Tensor]:
        """Live tensors by name, `<entry>/<parameter>`."""
        tensors = {f"master/{name}": master.detach() for name, master in self._masters.items()}
        for name, parameter in self._trained.items():
            for key, value in self._inner.state.get(parameter, {}).items():
                tensors[f"{key}/{name}"] = value if isinstance(value, Tensor) else torch.tensor(value)
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Resumes from a `state`. Missing masters are made from the policy, which must be restored before."""
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
    def _round(self, names: Sequence[str]) -> None:
        for name in names:
            self._masters[name].grad = None
        if names:
            working: list[Tensor] = [self._working[name] for name in names]
            masters = [self._masters[name] for name in names]
            torch._foreach_copy_(working, masters)  # pyright: ignore[reportPrivateImportUsage]


def _add_to(sums: dict[str, Tensor], name: str, source: Tensor) -> None:
    """Called for every gradient as soon as it is complete. Holds the sums alone: a hook of a parameter that references
    the parameters would keep them in memory."""
    assert source.grad is not None
    if name in sums:
        sums[name] += source.grad
    else:
        sums[name] = source.grad.float()
    source.grad = None


def _build(trained: Mapping[str, Tensor], settings: OptimizerSection) -> torch.optim.Optimizer:
    chosen = load_callable("optimizer", settings.name)
    offered = {
        "lr": settings.learning_rate,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.epsilon,
        "weight_decay": settings.weight_decay,
    }
    taken = inspect.signature(chosen).parameters
    # Some classes use the same name differently: Adafactor's `eps` is a pair.
    fits = {key: value for key, value in offered.items() if key in taken and _same_kind(value, taken[key].default)}
    options = fits | settings.options
    if chosen in FUSED and not {"foreach", "fused"} & options.keys():
        options["fused"] = True
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


def _same_kind(value: object, default: object) -> bool:
    return isinstance(default, tuple) == isinstance(value, tuple)


def learning_rate(settings: OptimizerSection, step: int, steps: int) -> float:
    """The rate of a step out of `steps`. A function of the step alone, so resuming needs no state."""
    warmup, last = settings.warmup_steps, settings.decay_steps or steps
    if step < warmup:
        return settings.learning_rate * (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, last - warmup))
    decayed = {"constant": 0.0, "linear": progress, "cosine": (1.0 - math.cos(math.pi * progress)) / 2}
    return settings.learning_rate * (1.0 - decayed[settings.schedule] * (1.0 - settings.final_fraction))
