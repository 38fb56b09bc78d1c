"""From the user's configuration to environments: the one to train on, and the one to evaluate on. Loads no torch."""

from __future__ import annotations

import sys
from typing import Any

from penstock.config.check import environment_options
from penstock.config.pipeline import PipelineSection
from penstock.config.run import Config
from penstock.envs.conformity import check_counted, check_text_environment
from penstock.envs.cursor import draw
from penstock.envs.protocol import DividedEnvironment, prompts_per_pass
from penstock.envs.registry import make_environment, scoring_of
from penstock.envs.settings import EnvSection
from penstock.errors import ConfigError, PenstockError

HELD_OUT = 1
"""Purpose of the draw that makes another seed of the run's."""


def environment_of(config: Config, pipeline: PipelineSection) -> Any:
    """The environment to train on: without what is kept for evaluation."""
    environment = _made(config, pipeline, pipeline.env)
    evaluation = pipeline.evaluation
    if evaluation.every_steps and evaluation.env is None and isinstance(environment, DividedEnvironment):
        environment.hold_out(evaluation.prompts)
    prompts = prompts_per_pass(environment)
    if prompts is not None and prompts < 1:
        raise ConfigError(f"environment {pipeline.env.name!r} has no prompts: its count is {prompts}")
    if prompts is None and pipeline.epochs is not None:
        raise ConfigError(
            f"epochs is {pipeline.epochs}, but environment {pipeline.env.name!r} never ends, so there are no passes "
            "over it to count: leave epochs out"
        )
    return environment


def evaluation_environment_of(config: Config, pipeline: PipelineSection) -> Any:
    """Prompts that training never sees: the user's other environment, rows kept out of this one, or another seed."""
    environment = _held_out(config, pipeline)
    prompts, wanted = prompts_per_pass(environment), pipeline.evaluation.prompts
    if prompts is not None and prompts < wanted:
        _close(environment)
        raise ConfigError(
            f"evaluation.prompts is {wanted}, but there are only {prompts} prompts to evaluate on: lower it, or name "
            "another environment in evaluation.env"
        )
    return environment


def _held_out(config: Config, pipeline: PipelineSection) -> Any:
    section = pipeline.evaluation
    if section.env is not None:
        return _made(config, pipeline, section.env)
    environment = _made(config, pipeline, pipeline.env)
    if isinstance(environment, DividedEnvironment):
        return environment.hold_out(section.prompts)
    if environment.count is not None:
        raise ConfigError(
            f"environment {pipeline.env.name!r} has only {environment.count} prompts and no method hold_out(count): "
            "name another environment in evaluation.env, or give it that method"
        )
    _close(environment)  # it was only made to be asked
    seed = pipeline.env.options.get("seed", config.run.seed)
    options = pipeline.env.options | {"seed": draw(int(seed), 0, HELD_OUT) & 0x7FFF_FFFF}  # type: ignore[arg-type]
    return _made(config, pipeline, pipeline.env.model_copy(update={"options": options}))


def _close(environment: Any) -> None:
    getattr(environment, "close", lambda: None)()


def _made(config: Config, pipeline: PipelineSection, section: EnvSection) -> Any:
    """What the environment's own code raises is the user's to fix, so it becomes a `ConfigError`."""
    sys.path[:0] = [str(path) for path in config.run.extra_path]
    owner = f"environment {section.name!r}"
    try:
        environment = make_environment(section.name, environment_options(section, config.run.seed))
    except PenstockError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{owner} could not be made: {type(error).__name__}: {error}") from error
    check_counted(owner, environment)
    if pipeline.kind == "language" and pipeline.rollout.workload is None:
        converses = pipeline.rollout.max_turns > 1 and hasattr(environment, "reply")
        check_text_environment(owner, environment, scoring_of(owner, pipeline.env, environment), converses=converses)
    return environment
