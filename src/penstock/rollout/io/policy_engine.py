"""Draws actions from a torch policy for a batch of observations; weights change between two draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from penstock.rollout.io.serving import Serving


class ActingModule(Protocol):
    """What the policy network must offer besides being a torch module."""

    def act(self, observations: Tensor, generator: torch.Generator, greedy: bool = False) -> tuple[Tensor, Tensor]:
        """Actions and their log-probabilities, one per observation."""
        ...


class PolicyEngine:
    """One policy on one device. `act` may be called from several threads."""

    def __init__(
        self,
        module: nn.Module,
        *,
        version: int = 0,
        digest: str = "",
        seed: int = 0,
        progressed: Callable[[], None] = lambda: None,
    ) -> None:
        self.module = module.eval().requires_grad_(False)
        self.serving = Serving(module, version=version, digest=digest)
        self.device = next(module.parameters()).device
        self._acting: Any = module
        self._progressed = progressed
        self._generator = torch.Generator(device=self.device).manual_seed(seed)

    @property
    def version(self) -> int:
        return self.serving.version

    @property
    def digest(self) -> str:
        return self.serving.digest

    def stage(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Serving.stage`."""
        self.serving.stage(tensors)

    def staged_tensors(self) -> dict[str, Tensor]:
        """See `Serving.staged_tensors`."""
        return self.serving.staged_tensors()

    def swap(self, version: int, digest: str, timeout_s: float = 60.0) -> float:
        """See `Serving.swap`."""
        return self.serving.swap(version, digest, timeout_s)

    def load_in_place(self, tensors: Mapping[str, Tensor], version: int, digest: str, timeout_s: float = 60.0) -> float:
        """See `Serving.load_in_place`."""
        return self.serving.load_in_place(tensors, version, digest, timeout_s)

    def served_tensors(self) -> dict[str, Tensor]:
        """See `Serving.served_tensors`."""
        return self.serving.served_tensors()

    def sleep(self, timeout_s: float = 60.0) -> None:
        """See `Serving.sleep`; episodes in flight stand still until `wake`."""
        self.serving.sleep(timeout_s)

    def wake(self, timeout_s: float = 60.0) -> None:
        """See `Serving.wake`."""
        self.serving.wake(timeout_s)

    def act(self, observations: np.ndarray, *, greedy: bool = False) -> tuple[np.ndarray, np.ndarray, int, str]:
        """Actions, their log-probabilities in float32, and the version and digest they were drawn with."""
        self._progressed()
        with self.serving.step() as (version, digest), torch.inference_mode():
            rows = torch.from_numpy(observations).to(self.device)
            actions, logprobs = self._acting.act(rows, self._generator, greedy)
            return actions.cpu().numpy(), logprobs.float().cpu().numpy(), version, digest

    def __repr__(self) -> str:
        return f"PolicyEngine({type(self.module).__name__} on {self.device}, {self.serving})"
