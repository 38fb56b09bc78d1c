"""gymnasium policies: plays one episode per sample, all episodes of a batch in parallel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from penstock.engines.policy import PolicyEngine
from penstock.records.ids import Version
from penstock.records.prompt import PromptLease
from penstock.rollout.hooks import Finished, Outcome

if TYPE_CHECKING:
    from penstock.envs.io.gymnasium import Episodes, GymnasiumEnvironment


class Episode(msgspec.Struct):
    """One played episode."""

    arrays: dict[str, np.ndarray]
    version: int
    digest: str

    @property
    def size_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


class GymnasiumWorkload:
    """One episode per sample; the reward is its undiscounted return."""

    def __init__(self, environment: GymnasiumEnvironment, engine: PolicyEngine, *, greedy: bool = False) -> None:
        """`greedy` takes the most likely action instead of sampling one."""
        self.environment = environment
        self.engine = engine
        self.greedy = greedy

    def preflight(self) -> None:
        """Plays one step of the first episode."""
        episodes = self.environment.start([0])
        with episodes:
            actions, _, _, _ = self.engine.act(episodes.observations[episodes.live], greedy=self.greedy)
            episodes.step(actions)

    def prepare(self, lease: PromptLease) -> PromptLease:
        return lease

    def collate(self, prepared: Sequence[PromptLease]) -> list[PromptLease]:
        return list(prepared)

    def generate(self, batch: Sequence[PromptLease]) -> list[list[Episode]]:
        positions = [lease.prompt for lease in batch for _ in lease.samples]
        episodes = self.environment.start(positions)
        recording = _Recording(len(positions))
        with episodes:
            while len(episodes.live):
                live = episodes.live
                observations = episodes.observations[live]
                actions, logprobs, version, digest = self.engine.act(observations, greedy=self.greedy)
                rewards = episodes.step(actions)
                recording.add(live, observations, actions, logprobs, rewards, version, digest)
        played = iter(recording.cut(episodes))
        return [[next(played) for _ in lease.samples] for lease in batch]

    def postprocess(self, prepared: PromptLease, generated: Sequence[Episode]) -> list[Outcome]:
        return [
            Finished(
                arrays=episode.arrays,
                reward=float(episode.arrays["rewards"].sum(dtype=np.float64)),
                version=Version(episode.version),
                weights_digest=episode.digest,
                length=len(episode.arrays["rewards"]),
            )
            for episode in generated
        ]


class _Recording:
    """Steps of all episodes in time order; split into episodes once, at the end."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._steps: list[tuple[np.ndarray, ...]] = []
        self._weights: list[tuple[int, str]] = []

    def add(
        self,
        live: np.ndarray,
        observations: np.ndarray,
        actions: np.ndarray,
        logprobs: np.ndarray,
        rewards: np.ndarray,
        version: int,
        digest: str,
    ) -> None:
        self._steps.append((live, observations, actions, logprobs, rewards))
        self._weights.append((version, digest))

    def cut(self, episodes: Episodes) -> list[Episode]:
        # A stable sort by row keeps every row's steps in time order: one pass, no loop over steps.
        columns = [np.concatenate(parts) for parts in zip(*self._steps, strict=True)]
        order = np.argsort(columns[0], kind="stable")
        observations, actions, logprobs, rewards = (column[order] for column in columns[1:])
        lengths = np.bincount(columns[0], minlength=self._rows)
        ends = np.cumsum(lengths)
        played: list[Episode] = []
        for row in range(self._rows):
            steps = slice(int(ends[row] - lengths[row]), int(ends[row]))
            version, digest = min(self._weights[: int(lengths[row])], key=lambda weights: weights[0])
            arrays = {
                "observations": observations[steps],
                "actions": actions[steps],
                "logprobs": logprobs[steps],
                "rewards": rewards[steps],
                "terminated": np.array([episodes.terminated[row]], dtype=np.uint8),
                "last_observation": episodes.observations[row].copy(),
            }
            played.append(Episode(arrays, version, digest))
        return played
