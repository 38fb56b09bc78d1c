"""Draws actions from a torch policy for a batch of observations; weights change between two draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from penstock.engines.serving import Serving, ServingEngine


class ActingModule(Protocol):
    """The method that the policy network must have besides those of a torch module."""

    def act(self, observations: Tensor, generator: torch.Generator, greedy: bool = False) -> tuple[Tensor, Tensor]:
        """Actions and their log-probabilities, one per observation."""
        ...


class PolicyEngine(ServingEngine):
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
        super().__init__(Serving(module, version=version, digest=digest), seed)
        self._acting = cast(ActingModule, module)
        self._progressed = progressed

    def act(self, observations: np.ndarray, *, greedy: bool = False) -> tuple[np.ndarray, np.ndarray, int, str]:
        """Actions, their log-probabilities in float32, and the version and digest of the weights."""
        self._progressed()
        with self.serving.step() as (version, digest), torch.inference_mode():
            rows = torch.from_numpy(observations).to(self.device)
            actions, logprobs = self._acting.act(rows, self.generator, greedy)
            return actions.cpu().numpy(), logprobs.float().cpu().numpy(), version, digest

    def __repr__(self) -> str:
        return f"PolicyEngine({type(self.module).__name__} on {self.device}, {self.serving})"
