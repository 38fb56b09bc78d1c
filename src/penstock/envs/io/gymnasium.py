"""gymnasium environments as a stream of episodes: position k is the episode that starts from the k-th seed.

All samples of a position start from the same state, so a group differs only in its actions, and any episode can be
repeated from its position.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import gymnasium as gym
import msgspec
import numpy as np
from gymnasium import spaces

from penstock.envs.cursor import draw
from penstock.errors import ConfigError


class Spaces(msgspec.Struct, frozen=True):
    """The shapes of observations and actions, for the policy."""

    observation_shape: tuple[int, ...]
    action_kind: Literal["discrete", "gaussian"]
    action_size: int
    """Number of actions, or of action components."""


class GymnasiumEnvironment:
    """One registered gymnasium environment, with any number of concurrent episodes."""

    def __init__(
        self,
        *,
        id: str,
        seed: int = 0,
        max_episode_steps: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.id = id
        self.seed = seed
        self._options = dict(options or {})
        if max_episode_steps is not None:
            self._options["max_episode_steps"] = max_episode_steps
        self._idle: list[gym.Env[Any, Any]] = []
        self._lock = threading.Lock()
        first = self._make()
        self._observation_space = first.observation_space
        self._action_space = first.action_space
        self.spaces = Spaces(_observation_shape(first), *_actions(first))
        self._step_limit = first.spec.max_episode_steps if first.spec is not None else None
        self._idle.append(first)

    @property
    def sample_bytes(self) -> int | None:
        """Size of the longest episode as delivered; None if episodes have no step limit."""
        if self._step_limit is None or self._step_limit < 0:
            return None
        action = 8 if self.spaces.action_kind == "discrete" else 4 * self.spaces.action_size
        return self._step_limit * (4 * math.prod(self.spaces.observation_shape) + action + 8)

    @property
    def count(self) -> None:
        return None

    def episode_seed(self, position: int) -> int:
        """The reset seed of the episode at a position."""
        return draw(self.seed, position) & 0x7FFF_FFFF

    def start(self, positions: Sequence[int]) -> Episodes:
        """Starts one episode per position. Call `close` on the result in the end."""
        with self._lock:
            ready = [self._idle.pop() for _ in range(min(len(self._idle), len(positions)))]
        ready += [self._make() for _ in range(len(positions) - len(ready))]
        return Episodes(self, ready, [self.episode_seed(position) for position in positions])

    def close(self) -> None:
        """Closes all idle environments."""
        with self._lock:
            idle, self._idle = self._idle, []
        for environment in idle:
            environment.close()

    def release(self, environments: Sequence[gym.Env[Any, Any]]) -> None:
        """Keeps environments for the next episodes: making one can be much slower than a reset."""
        with self._lock:
            self._idle.extend(environments)

    def observe(self, observation: Any) -> np.ndarray:
        """An observation as one float32 array."""
        if isinstance(self._observation_space, spaces.Box):
            return np.asarray(observation, dtype=np.float32)
        return np.asarray(spaces.flatten(self._observation_space, observation), dtype=np.float32)

    def act(self, action: np.ndarray) -> Any:
        """A policy's action as the environment takes it: offset for discrete ones, clipped for continuous ones."""
        if isinstance(self._action_space, spaces.Discrete):
            return int(action) + int(self._action_space.start)
        assert isinstance(self._action_space, spaces.Box)
        shaped = np.asarray(action, dtype=self._action_space.dtype).reshape(self._action_space.shape)
        return np.clip(shaped, self._action_space.low, self._action_space.high)

    def _make(self) -> gym.Env[Any, Any]:
        try:
            return gym.make(self.id, disable_env_checker=True, **self._options)
        except (gym.error.Error, ImportError, TypeError) as error:
            raise ConfigError(f"gymnasium environment {self.id!r} cannot be made: {error}") from error

    def __repr__(self) -> str:
        return f"GymnasiumEnvironment({self.id!r}, {self.spaces}, seed={self.seed}, idle={len(self._idle)})"


class Episodes:
    """Concurrent episodes. `live` has the rows of those that have not ended."""

    def __init__(
        self, owner: GymnasiumEnvironment, environments: list[gym.Env[Any, Any]], seeds: Sequence[int]
    ) -> None:
        self._owner = owner
        self._environments = environments
        self.observations = np.stack(
            [
                owner.observe(environment.reset(seed=seed)[0])
                for environment, seed in zip(environments, seeds, strict=True)
            ]
        )
        """The latest observation of every row; of ended rows, the last one."""
        self.live = np.arange(len(environments))
        self.terminated = np.zeros(len(environments), dtype=bool)

    def step(self, actions: np.ndarray) -> np.ndarray:
        """Applies one action per live row and returns the rewards, in the order of `live` before the call."""
        rewards = np.empty(len(self.live), dtype=np.float32)
        running = np.ones(len(self.live), dtype=bool)
        owner = self._owner
        for place, row in enumerate(self.live):
            observation, reward, terminated, truncated, _ = self._environments[row].step(owner.act(actions[place]))
            self.observations[row] = owner.observe(observation)
            rewards[place] = reward
            if terminated or truncated:
                self.terminated[row] = terminated
                running[place] = False
        if not running.all():
            self.live = self.live[running]
        return rewards

    def close(self) -> None:
        """Releases the environments for the next episodes."""
        self._owner.release(self._environments)
        self._environments = []


def _observation_shape(environment: gym.Env[Any, Any]) -> tuple[int, ...]:
    space = environment.observation_space
    if isinstance(space, spaces.Box):
        return tuple(space.shape)
    if not space.is_np_flattenable:
        raise ConfigError(f"observations of kind {type(space).__name__} cannot be made into one array")
    return (spaces.flatdim(space),)


def _actions(environment: gym.Env[Any, Any]) -> tuple[Literal["discrete", "gaussian"], int]:
    space = environment.action_space
    if isinstance(space, spaces.Discrete):
        return "discrete", int(space.n)
    if isinstance(space, spaces.Box):
        return "gaussian", int(np.prod(space.shape))
    raise ConfigError(
        f"actions of kind {type(space).__name__} are not supported; expected Discrete or Box (continuous)"
    )
