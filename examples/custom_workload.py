"""Your own workload: a bandit with a noisy hint at the arm that pays. Copy it and change the five hooks.
In a configuration: `env.name = "custom_workload:Bandit"`, `rollout.workload = "custom_workload:BanditWorkload"`.
"""

from typing import Any

import numpy as np

from penstock import Finished, Outcome, PromptLease, Spaces


class Bandit:
    """The environment: position k of the endless prompt stream is machine k, a pure function of the seed and k."""

    count = None
    spaces = Spaces(observation_shape=(8,), action_kind="discrete", action_size=8)

    def __init__(self, *, seed: int = 0) -> None:
        self.seed = seed

    def machine(self, position: int) -> tuple[np.ndarray, int]:
        draws = np.random.default_rng([self.seed, position])
        arm = int(draws.integers(8))
        return (draws.normal(0, 0.3, 8) + np.eye(8)[arm]).astype(np.float32), arm


class BanditWorkload:
    def __init__(self, environment: Bandit, engine: Any, policy: object = None) -> None:
        self.environment, self.engine = environment, engine

    def preflight(self) -> None:
        """Called once, before the first lease: raises if the workload cannot run."""
        self.engine.act(self.environment.machine(0)[0][None])

    def prepare(self, lease: PromptLease) -> tuple[np.ndarray, int]:
        """Per prompt, ahead of time, on a separate thread: the hint once per sample, and the arm that pays."""
        hint, arm = self.environment.machine(lease.prompt)
        return np.tile(hint, (len(lease.samples), 1)), arm

    def collate(self, prepared: list[tuple[np.ndarray, int]]) -> list[np.ndarray]:
        """One batch for the engine."""
        return [hints for hints, _ in prepared]

    def generate(self, batch: list[np.ndarray]) -> list[list[tuple]]:
        """One result per prompt, in order, while other prompts are prepared and postprocessed."""
        actions, logprobs, version, digest = self.engine.act(np.concatenate(batch))
        drawn = iter(zip(actions, logprobs, strict=True))
        return [[(hint, *next(drawn), version, digest) for hint in hints] for hints in batch]

    def postprocess(self, prepared: tuple[np.ndarray, int], generated: list[tuple]) -> list[Outcome]:
        """One outcome per sample: its reward and its arrays, here those of an episode of one step."""
        outcomes: list[Outcome] = []
        for hint, action, logprob, version, digest in generated:
            reward = float(action == prepared[1])
            step = {"observations": hint, "actions": action, "logprobs": logprob, "rewards": np.float32(reward)}
            arrays = {name: np.asarray(value)[None] for name, value in step.items()}
            arrays |= {"terminated": np.ones(1, np.uint8), "last_observation": hint}
            outcomes.append(Finished(arrays, reward, version, digest, length=1))
        return outcomes
