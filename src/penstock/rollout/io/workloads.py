"""The workload's five hooks, as the configuration asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.engines.models import ActorCriticPolicy, LanguagePolicy
from penstock.envs.registry import find_reward
from penstock.envs.rewards import Rubric
from penstock.envs.settings import EnvSection
from penstock.rollout.hooks import Workload
from penstock.rollout.io.gymnasium_workload import GymnasiumWorkload
from penstock.rollout.io.kept import KeptEpisodes
from penstock.rollout.io.language_workload import LanguageWorkload
from penstock.rollout.io.request_workload import RequestWorkload
from penstock.rollout.settings import RolloutSection
from penstock.runtime.named import load_callable


class ScoredEnvironment:
    """An environment whose rewards are checked, and replaced by the configured functions if there are any."""

    def __init__(self, environment: Any, section: EnvSection) -> None:
        functions = [find_reward(name) for name in section.rewards] or [environment.score]
        self._environment = environment
        self._rubric = Rubric(functions, section.reward_weights or None)

    @property
    def count(self) -> int | None:
        return self._environment.count

    def prompt(self, position: int) -> Any:
        return self._environment.prompt(position)

    def score(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        return self._rubric(prompts, completions, **columns)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)


def workload_of(
    env: EnvSection,
    rollout: RolloutSection,
    environment: Any,
    policy: LanguagePolicy | ActorCriticPolicy,
    engine: Any,
    kept: Path | None,
    *,
    greedy: bool = False,
) -> Workload[Any, Any, Any]:
    """The five hooks: the user's own class if one is named, else the built-in one that fits environment and engine.

    `engine` is a `protocol.Engine`, of requests or of batches as its capabilities say. `kept` is where unfinished
    episodes of a worker that leaves wait for the next one. `greedy` draws nothing and takes what is likeliest; a
    workload of the user's own draws as it always does.
    """
    if rollout.workload is not None:
        return load_callable("workload", rollout.workload)(environment, engine, policy)
    if not isinstance(policy, LanguagePolicy):
        return GymnasiumWorkload(environment, engine, greedy=greedy)
    scored = ScoredEnvironment(environment, env)
    sampling = rollout.model_dump(include={"max_new_tokens", "temperature", "top_k", "top_p", "min_p", "max_turns"})
    sampling |= {"greedy": greedy, "kept": KeptEpisodes(kept) if kept is not None else None}
    if not engine.capabilities.requests:
        return LanguageWorkload(scored, engine, policy.tokenizer, **sampling)
    return RequestWorkload(scored, engine, policy.tokenizer, reply_threads=rollout.reply_threads, **sampling)
