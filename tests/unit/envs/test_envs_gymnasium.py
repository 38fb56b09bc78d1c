"""gymnasium episodes: reproducible from their position, discrete and continuous, and one per sample."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from penstock.engines.policy import PolicyEngine
from penstock.envs.io.gymnasium import GymnasiumEnvironment
from penstock.errors import ConfigError
from penstock.records.ids import PromptIndex, SampleId, Version
from penstock.records.prompt import PromptLease
from penstock.rollout.hooks import Finished
from penstock.rollout.io.gymnasium_workload import GymnasiumWorkload


class Gaussian(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(1))

    def act(self, observations: torch.Tensor, generator: torch.Generator, greedy: bool = False) -> Any:
        noise = torch.randn(len(observations), 1, generator=generator) * 3
        normal = torch.distributions.Normal(self.mean, 3.0)
        return noise, normal.log_prob(noise).sum(-1)


class Coin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(2))

    def act(self, observations: torch.Tensor, generator: torch.Generator, greedy: bool = False) -> Any:
        actions = torch.randint(0, 2, (len(observations),), generator=generator)
        return actions, torch.full((len(observations),), -0.6931)


def lease(position: int, samples: int) -> PromptLease:
    ids = tuple(SampleId(position * 100 + member) for member in range(samples))
    return PromptLease(PromptIndex(position), 0, ids, tuple(range(samples)), Version(0))


def test_all_samples_of_a_position_start_alike_and_positions_differ() -> None:
    environment = GymnasiumEnvironment(id="CartPole-v1", seed=1)
    episodes = environment.start([4, 4, 5])
    assert np.array_equal(episodes.observations[0], episodes.observations[1])
    assert not np.array_equal(episodes.observations[0], episodes.observations[2])
    episodes.close()
    again = GymnasiumEnvironment(id="CartPole-v1", seed=1).start([5])
    assert np.array_equal(again.observations[0], episodes.observations[2])


def test_discrete_episodes_have_the_promised_arrays() -> None:
    environment = GymnasiumEnvironment(id="CartPole-v1")
    workload = GymnasiumWorkload(environment, PolicyEngine(Coin(), version=4, digest="four"))
    workload.preflight()
    batch = workload.collate([workload.prepare(lease(0, 3)), workload.prepare(lease(1, 2))])
    generated = workload.generate(batch)
    assert [len(group) for group in generated] == [3, 2]
    outcomes = [
        outcome
        for prepared, group in zip(batch, generated, strict=True)
        for outcome in workload.postprocess(prepared, group)
    ]
    for outcome in outcomes:
        assert isinstance(outcome, Finished)
        steps = outcome.length
        arrays = outcome.arrays
        assert arrays["observations"].shape == (steps, 4)
        assert arrays["observations"].dtype == np.float32
        assert arrays["actions"].shape == (steps,)
        assert arrays["actions"].dtype == np.int64
        assert arrays["logprobs"].shape == arrays["rewards"].shape == (steps,)
        assert arrays["terminated"].tolist() == [1]
        assert arrays["last_observation"].shape == (4,)
        assert outcome.reward == steps
        assert (outcome.version, outcome.weights_digest) == (4, "four")
    assert len({outcome.length for outcome in outcomes if isinstance(outcome, Finished)}) > 1


def test_the_recorded_episode_is_the_one_that_was_played() -> None:
    environment = GymnasiumEnvironment(id="CartPole-v1", seed=9)
    workload = GymnasiumWorkload(environment, PolicyEngine(Coin()))
    [[episode]] = workload.generate([lease(7, 1)])
    real = gym.make("CartPole-v1")
    observation, _ = real.reset(seed=environment.episode_seed(7))
    terminated = False
    for step, action in enumerate(episode.arrays["actions"]):
        assert np.allclose(observation, episode.arrays["observations"][step])
        observation, _, terminated, _, _ = real.step(int(action))
    assert terminated
    assert np.allclose(observation, episode.arrays["last_observation"])


def test_continuous_actions_are_clipped_for_the_environment_and_kept_for_training() -> None:
    environment = GymnasiumEnvironment(id="Pendulum-v1", max_episode_steps=20)
    assert environment.spaces.action_kind == "gaussian"
    workload = GymnasiumWorkload(environment, PolicyEngine(Gaussian()))
    [[episode]] = workload.generate([lease(0, 1)])
    assert episode.arrays["actions"].shape == (20, 1)
    assert np.abs(episode.arrays["actions"]).max() > 2.0, "beyond what the environment takes"
    assert episode.arrays["terminated"].tolist() == [0], "cut off by the step limit, not ended"


def test_environments_are_reused() -> None:
    environment = GymnasiumEnvironment(id="CartPole-v1")
    for _ in range(3):
        environment.start(range(5)).close()
    assert "idle=5" in repr(environment)
    environment.close()


class Odd(gym.Env[Any, Any]):
    def __init__(self, action_space: Any, observation_space: Any) -> None:
        self.action_space = action_space
        self.observation_space = observation_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        return self.observation_space.sample(), 1.0, True, False, {}


gym.register("OddActions-v0", lambda **options: Odd(spaces.MultiBinary(3), spaces.Box(0, 1, (2,))))
gym.register(
    "OddObservations-v0", lambda **options: Odd(spaces.Discrete(2, start=5), spaces.Dict({"a": spaces.Discrete(3)}))
)


def test_structured_observations_are_flattened_and_offset_actions_shifted() -> None:
    environment = GymnasiumEnvironment(id="OddObservations-v0")
    assert environment.spaces.observation_shape == (3,)
    [[episode]] = GymnasiumWorkload(environment, PolicyEngine(Coin())).generate([lease(0, 1)])
    assert episode.arrays["observations"].sum() == 1


class Scripted(gym.Env[Any, Any]):
    """Records the actions it is given, and returns the observations it was made with."""

    def __init__(self, action_space: Any, observation_space: Any, observations: list[Any]) -> None:
        self.action_space, self.observation_space = action_space, observation_space
        self.observations, self.taken = observations, []
        self.closed = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.observations[0], {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.taken.append(action)
        observation = self.observations[len(self.taken)]
        if isinstance(observation, Exception):
            raise observation
        return observation, 1.0, len(self.taken) + 1 == len(self.observations), False, {}

    def close(self) -> None:
        self.closed = True


def scripted(
    monkeypatch: pytest.MonkeyPatch, action_space: Any, observation_space: Any, observations: list[Any]
) -> Any:
    one = Scripted(action_space, observation_space, observations)
    monkeypatch.setattr(gym, "make", lambda *_, **__: one)
    return GymnasiumEnvironment(id="Scripted-v0"), one


LINE = spaces.Box(-1, 1, (1,), np.float32)


@pytest.mark.parametrize(
    ("space", "given", "taken"),
    [
        (spaces.Box(10, 20, (1,), np.float32), [-1.0, -0.5, 0.0, 1.0, 3.0], [10, 12.5, 15, 20, 20]),
        (spaces.Box(-1, 1, (1,), np.float32), [-1.0, 0.25, 7.0], [-1, 0.25, 1]),
        (spaces.Box(0, 3, (1,), np.int64), [-5.0, -0.6, -0.4, 0.4, 0.6, 5.0], [0, 0, 1, 2, 3, 3]),
        (spaces.Box(-np.inf, np.inf, (1,), np.float32), [-40.0, 40.0], [-40, 40]),
        (spaces.Box(0, np.inf, (1,), np.float32), [-40.0, 40.0], [0, 40]),
        (spaces.Box(-3e38, 3e38, (1,), np.float32), [-40.0, 40.0], [-40, 40]),
    ],
)
def test_box_actions_reach_their_bounds_and_integers_are_rounded(
    space: Any, given: list[float], taken: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    still = np.zeros(1, np.float32)
    environment, one = scripted(monkeypatch, space, LINE, [still] * (len(given) + 2))
    episodes = environment.start([0])
    for action in given:
        episodes.step(np.array([[action]], np.float32))
    assert np.allclose(np.concatenate(one.taken), taken)
    assert {action.dtype for action in one.taken} == {space.dtype}


def test_bounded_integer_observations_are_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    space = spaces.Dict(
        {
            "memory": spaces.Box(0, 255, (2,), np.uint8),
            "seat": spaces.Discrete(2),
            "speed": spaces.Box(0, 255, (1,), np.float32),
            "ticks": spaces.Box(0, 2**31 - 1, (1,), np.int64),
        }
    )
    first = {
        "memory": np.array([0, 255], np.uint8),
        "seat": 1,
        "speed": np.array([51], np.float32),
        "ticks": np.array([9]),
    }
    environment, _ = scripted(monkeypatch, LINE, space, [first])
    assert environment.start([0]).observations.tolist() == [[0, 1, 0, 1, 51, 9]]


def test_an_observation_of_another_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    environment, _ = scripted(monkeypatch, LINE, spaces.Box(-1, 1, (3,)), [np.zeros(3, np.float32), np.float32(0.5)])
    episodes = environment.start([0])
    with pytest.raises(ValueError, match=r"'Scripted-v0' returned an observation of shape \(\); its .* has \(3,\)"):
        episodes.step(np.zeros((1, 1), np.float32))


def test_an_environment_that_raised_is_closed_and_not_played_again(monkeypatch: pytest.MonkeyPatch) -> None:
    still = np.zeros(1, np.float32)
    environment, one = scripted(monkeypatch, LINE, LINE, [still, RuntimeError("the simulator crashed"), still])
    workload = GymnasiumWorkload(environment, PolicyEngine(Gaussian()))
    with pytest.raises(RuntimeError, match="the simulator crashed"):
        workload.generate([lease(0, 1)])
    assert one.closed
    assert "idle=0" in repr(environment)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(0, 255, (84, 84), np.uint8),
        spaces.Box(0, 255, (84, 84, 3), np.uint8),
        spaces.Box(0, 1, (3, 64, 64), np.float32),
        spaces.Dict({"camera": spaces.Box(0, 255, (8, 8, 3), np.uint8), "speed": LINE}),
    ],
)
def test_images_are_refused(space: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="are images, and the policy is a network for vectors"):
        scripted(monkeypatch, LINE, space, [])


@pytest.mark.parametrize(
    ("id", "message"), [("NoSuch-v0", "'NoSuch-v0' cannot be made"), ("OddActions-v0", "MultiBinary are not supported")]
)
def test_what_cannot_be_played_is_refused(id: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GymnasiumEnvironment(id=id)
