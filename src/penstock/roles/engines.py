"""From the user's configuration to what generates: the engine and the workload's five hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from penstock.config.pipeline import PipelineSection
from penstock.engines.models import ActorCriticPolicy, LanguagePolicy
from penstock.engines.policy import PolicyEngine
from penstock.engines.requests import RequestEngine
from penstock.engines.serving import ServingEngine
from penstock.engines.settings import Engine, TorchEngineSection
from penstock.engines.torch.continuous import ContinuousEngine
from penstock.engines.torch.static import TorchEngine
from penstock.envs.registry import find_reward
from penstock.envs.rewards import Rubric
from penstock.rollout.hooks import Workload
from penstock.rollout.io.gymnasium_workload import GymnasiumWorkload
from penstock.rollout.io.kept import KeptEpisodes
from penstock.rollout.io.language_workload import LanguageWorkload
from penstock.rollout.io.request_workload import RequestWorkload
from penstock.runtime.named import load_callable


class ScoredEnvironment:
    """An environment whose rewards are checked, and replaced by the configured functions if there are any."""

    def __init__(self, environment: Any, pipeline: PipelineSection) -> None:
        functions = [find_reward(name) for name in pipeline.env.rewards] or [environment.score]
        self._environment = environment
        self._rubric = Rubric(functions, pipeline.env.reward_weights or None)

    @property
    def count(self) -> int | None:
        return self._environment.count

    def prompt(self, position: int) -> Any:
        return self._environment.prompt(position)

    def score(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        return self._rubric(prompts, completions, **columns)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)


def engine_of(
    policy: LanguagePolicy | ActorCriticPolicy,
    seed: int,
    progressed: Callable[[], None],
    section: Engine,
) -> ServingEngine:
    """The engine that serves a policy. It has no digest yet: it may not serve before published weights are in."""
    if not isinstance(policy, LanguagePolicy):
        return PolicyEngine(policy.module, seed=seed, progressed=progressed)
    assert isinstance(section, TorchEngineSection)
    pad_id = policy.tokenizer.pad_id
    if section.batching == "static":
        return TorchEngine(policy.module, pad_id=pad_id, seed=seed, progressed=progressed)
    bounds = section.model_dump(include={"rows", "cache_tokens", "kept_tokens", "reread"})
    return ContinuousEngine(policy.module, pad_id=pad_id, seed=seed, progressed=progressed, **bounds)


def workload_of(
    pipeline: PipelineSection,
    environment: Any,
    policy: LanguagePolicy | ActorCriticPolicy,
    engine: ServingEngine | RequestEngine,
    kept: Path | None,
    *,
    greedy: bool = False,
) -> Workload[Any, Any, Any]:
    """The five hooks: the user's own class if one is named, else the built-in one that fits environment and engine.

    `kept` is where unfinished episodes of a worker that leaves wait for the next one. `greedy` draws nothing and takes
    what is likeliest; a workload of the user's own draws as it always does.
    """
    rollout = pipeline.rollout
    if rollout.workload is not None:
        return load_callable("workload", rollout.workload)(environment, engine, policy)
    if isinstance(engine, PolicyEngine):
        return GymnasiumWorkload(environment, engine, greedy=greedy)
    assert isinstance(policy, LanguagePolicy)
    scored = ScoredEnvironment(environment, pipeline)
    sampling = rollout.model_dump(include={"max_new_tokens", "temperature", "top_k", "top_p", "min_p", "max_turns"})
    sampling |= {"greedy": greedy, "kept": KeptEpisodes(kept) if kept is not None else None}
    if isinstance(engine, TorchEngine):
        return LanguageWorkload(scored, engine, policy.tokenizer, **sampling)
    requests = cast(RequestEngine, engine)
    sampling["reply_threads"] = rollout.reply_threads
    return RequestWorkload(scored, requests, policy.tokenizer, **sampling)
