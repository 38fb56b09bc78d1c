"""The workload's five hooks, as the configuration asks for them."""

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
    """The five hooks: the user's own class if one is named, else the built-in one that fits environment and engine.

    `engine` is a `protocol.Engine` that fits the policy. `kept` is where unfinished
    episodes of a worker that leaves wait for the next one. `greedy` draws nothing and takes what is likeliest; a
    workload of the user's own draws as it always does. `rubric_elsewhere` makes the environment's rubric in another
    process, see `Scoring`.
    """
    if rollout.workload is not None:
        return load_callable("workload", rollout.workload)(environment, engine, policy)
    if not isinstance(policy, LanguagePolicy):
        return GymnasiumWorkload(environment, engine, greedy=greedy)
    scoring = Scoring(rubric_of(env, environment), env, elsewhere=rubric_elsewhere, progressed=progressed)
    given = (environment, engine, policy.tokenizer, rollout)
    unfinished = KeptEpisodes(kept) if kept is not None else None
    if hasattr(environment, "play"):
        from penstock.rollout.io.agent_workload import AgentWorkload  # with a web server, which no other needs

        threads = env.reward_concurrency
        return AgentWorkload(*given, threads=threads, greedy=greedy, scoring=scoring, kept=unfinished)
    return LanguageWorkload(*given, greedy=greedy, scoring=scoring, kept=unfinished)


def close_workload(workload: Any) -> None:
    """Ends what a workload started, if it has a method for that."""
    getattr(workload, "close", lambda: None)()
