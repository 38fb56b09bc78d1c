"""gymnasium environments as a stream of episodes: position k is the episode that starts from the k-th seed.

All samples of a position start from the same state, so a group differs only in its actions, and any episode can be
repeated from its position.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import gymnasium as gym
import msgspec
import numpy as np
from gymnasium import spaces

from penstock.envs.cursor import draw
from penstock.errors import ConfigError

WIDEST = 1e6
"""A wider range stands for a number without bounds."""


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
        self._lowest, self._width = _integer_ranges(self._observation_space)
        self._action_middle, self._action_reach = _action_ranges(self._action_space)
        self._scales_observations = bool((self._width != 1).any() or (self._lowest != 0).any())
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
        try:
            return Episodes(self, ready, [self.episode_seed(position) for position in positions])
        except BaseException:
            _close_all(ready)
            raise

    def close(self) -> None:
        """Closes all idle environments."""
        with self._lock:
            idle, self._idle = self._idle, []
        _close_all(idle)

    def release(self, environments: Sequence[gym.Env[Any, Any]]) -> None:
        """Keeps environments for the next episodes: making one can be much slower than a reset."""
        with self._lock:
            self._idle.extend(environments)

    def observe(self, observation: Any) -> np.ndarray:
        """An observation as one float32 array; bounded integers are scaled to 0 to 1."""
        space = self._observation_space
        flat = observation if isinstance(space, spaces.Box) else spaces.flatten(space, observation)
        array = np.asarray(flat, dtype=np.float32)
        if array.shape != self.spaces.observation_shape:
            raise ValueError(
                f"environment {self.id!r} returned an observation of shape {array.shape}; its observation_space has "
                f"{self.spaces.observation_shape}"
            )
        return (array - self._lowest) / self._width if self._scales_observations else array

    def act(self, action: np.ndarray) -> Any:
        """A policy's action as the environment takes it: offset for discrete ones. In a box, -1 and 1 are the bounds of
        a component that has two; all is clipped to the bounds."""
        space = self._action_space
        if isinstance(space, spaces.Discrete):
            return int(action) + int(space.start)
        assert isinstance(space, spaces.Box)
        scaled = self._action_middle + self._action_reach * action.reshape(space.shape)
        if np.issubdtype(space.dtype, np.integer):
            scaled = np.rint(scaled)
        return np.clip(scaled, space.low, space.high).astype(space.dtype)

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

    def __enter__(self) -> Episodes:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """After an error the environments are closed, since one of them may be broken."""
        if kind is None:
            self.close()
            return
        _close_all(self._environments)
        self._environments = []


def _close_all(environments: Sequence[gym.Env[Any, Any]]) -> None:
    """Also closes the others if one raises."""
    with contextlib.ExitStack() as closing:
        for environment in environments:
            closing.callback(environment.close)


def _observation_shape(environment: gym.Env[Any, Any]) -> tuple[int, ...]:
    space = environment.observation_space
    for part in _parts(space):
        if isinstance(part, spaces.Box) and (len(part.shape) > 2 or (len(part.shape) == 2 and part.dtype == np.uint8)):
            raise ConfigError(
                f"observations of shape {part.shape} and type {part.dtype} are images, and the policy is a network for "
                "vectors: wrap the environment so that it returns features, or a vector (at most two dimensions, not "
                "of type uint8)"
            )
    if isinstance(space, spaces.Box):
        return tuple(space.shape)
    if not space.is_np_flattenable:
        raise ConfigError(f"observations of kind {type(space).__name__} cannot be made into one array")
    return (spaces.flatdim(space),)


def _parts(space: spaces.Space[Any]) -> Iterator[spaces.Space[Any]]:
    """The spaces of a nested space, in the order in which they are flattened."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for part in space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces:
            yield from _parts(part)
    else:
        yield space


def _integer_ranges(space: spaces.Space[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Lowest value and width of each number of an observation, as float32: 0 and 1 for what is no bounded integer."""
    lowest: list[np.ndarray] = []
    width: list[np.ndarray] = []
    for part in _parts(space):
        if isinstance(part, spaces.Box):
            low, high, bounded = _bounds(part)
            scaled = bounded & (high > low) & np.issubdtype(part.dtype, np.integer)
            lowest.append(np.where(scaled, low, 0).ravel())
            width.append(np.where(scaled, high - low, 1).ravel())
        else:
            lowest.append(np.zeros(spaces.flatdim(part)))
            width.append(np.ones(spaces.flatdim(part)))
    shape = space.shape if isinstance(space, spaces.Box) else (-1,)
    return tuple(np.concatenate(one).astype(np.float32).reshape(shape) for one in (lowest, width))  # type: ignore[return-value]


def _bounds(box: spaces.Box) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lowest and highest value of each component, and whether it has both."""
    low, high = box.low.astype(np.float64), box.high.astype(np.float64)
    return low, high, box.bounded_below & box.bounded_above & (high - low <= WIDEST)


def _action_ranges(space: spaces.Space[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Middle of each component of a box and the distance to its bounds; 0 and 1 for one without two bounds."""
    if not isinstance(space, spaces.Box):
        return np.zeros(()), np.ones(())
    low, high, bounded = _bounds(space)
    if np.issubdtype(space.dtype, np.integer):
        low, high = low - 0.5, high + 0.5  # every integer, also the first and the last, has an equal part of -1 to 1
    low, high = np.where(bounded, low, -1), np.where(bounded, high, 1)
    return (low + high) / 2, (high - low) / 2


def _actions(environment: gym.Env[Any, Any]) -> tuple[Literal["discrete", "gaussian"], int]:
    space = environment.action_space
    if isinstance(space, spaces.Discrete):
        return "discrete", int(space.n)
    if isinstance(space, spaces.Box):
        return "gaussian", int(np.prod(space.shape))
    raise ConfigError(
        f"actions of kind {type(space).__name__} are not supported; expected Discrete or Box (continuous)"
    )
