"""Your own gymnasium environment, with a rare reward: walk to the end of a corridor.

    penstock run examples/corridor.toml

The walker starts at the left. Only the step that reaches the right end is rewarded. A random walk rarely reaches it
within the time limit.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np


class Corridor(gymnasium.Env[np.ndarray, np.int64]):
    """Action 0 walks left, 1 right. The observation is one-hot."""

    def __init__(self, length: int = 10) -> None:
        self.length = length
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (length,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._place = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._place = 0
        return self._observation(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._place = max(0, self._place + (1 if action == 1 else -1))
        arrived = self._place == self.length - 1
        return self._observation(), float(arrived), arrived, False, {}

    def _observation(self) -> np.ndarray:
        return np.eye(self.length, dtype=np.float32)[self._place]


gymnasium.register("Corridor-v0", entry_point="corridor:Corridor", max_episode_steps=30)
