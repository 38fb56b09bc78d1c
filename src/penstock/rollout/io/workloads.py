"""Builds the workload that the configuration names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.engines.models import ActorCriticPolicy, LanguagePolicy
from penstock.envs.registry import rubric_of
from penstock.envs.rewards import Rubric
from penstock.envs.settings import EnvSection
from penstock.rollout.hooks import Workload
from penstock.rollout.io.gymnasium_workload import GymnasiumWorkload
from penstock.rollout.io.kept import KeptEpisodes
from penstock.rollout.io.language_workload import LanguageWorkload
from penstock.rollout.io.scoring import Scoring
from penstock.rollout.settings import RolloutSection
from penstock.runtime.named import load_callable


def workload_of(
    env: EnvSection,
    rollout: RolloutSection,
    environment: Any,
    policy: LanguagePolicy | ActorCriticPolicy,
    engine: Any,
    kept: Path | None,
    *,
    greedy: bool = False,
    rubric_elsewhere: tuple[Callable[..., Rubric], tuple[Any, ...]] | None = None,
    progressed: Callable[[str], None] = lambda doing: None,
) -> Workload[Any, Any, Any]:
    """The user's own class if one is named, else the built-in workload for the environment and engine.

    `engine` is a `protocol.Engine` that fits the policy. `kept` is the directory where a worker that leaves stores
    unfinished episodes for the next one. `greedy` takes the most likely token or action instead of sampling; it does
    not affect the user's own class. `rubric_elsewhere` makes the environment's rubric in another process, see
    `Scoring`.
    """
    if rollout.workload is not None:
        return load_callable("workload", rollout.workload)(environment, engine, policy)
    if not isinstance(policy, LanguagePolicy):
        return GymnasiumWorkload(environment, engine, greedy=greedy)
    scoring = Scoring(rubric_of(env, environment), env, elsewhere=rubric_elsewhere, progressed=progressed)
    arguments = (environment, engine, policy.tokenizer, rollout)
    unfinished = KeptEpisodes(kept) if kept is not None else None
    if hasattr(environment, "play"):
        from penstock.rollout.io.agent_workload import AgentWorkload  # imports a web server; no other one does

        threads = env.reward_concurrency
        options: Any = {"greedy": greedy, "scoring": scoring, "kept": unfinished}
        return AgentWorkload(*arguments, threads=threads, progressed=progressed, **options)
    return LanguageWorkload(*arguments, greedy=greedy, scoring=scoring, kept=unfinished)


def close_workload(workload: Any) -> None:
    """Calls the workload's `close`, if it has one."""
    getattr(workload, "close", lambda: None)()
