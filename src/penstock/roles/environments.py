"""From the user's configuration to environments: the one to train on, and the one to evaluate on. Loads no torch."""

from __future__ import annotations

import sys
from typing import Any

from penstock.config.check import environment_options
from penstock.config.pipeline import EnvSection, PipelineSection
from penstock.config.run import Config
from penstock.envs.cursor import draw
from penstock.envs.protocol import DividedEnvironment
from penstock.envs.registry import make_environment
from penstock.errors import ConfigError, PenstockError

HELD_OUT = 1
"""Purpose of the draw that makes another seed of the run's."""


def environment_of(config: Config, pipeline: PipelineSection) -> Any:
    """The environment to train on: without what is kept for evaluation."""
    environment = _made(config, pipeline.env)
    evaluation = pipeline.evaluation
    if evaluation.every_steps and evaluation.env is None and isinstance(environment, DividedEnvironment):
        environment.hold_out(evaluation.prompts)
    return environment


def evaluation_environment_of(config: Config, pipeline: PipelineSection) -> Any:
    """Prompts that training never sees: the user's other environment, rows kept out of this one, or another seed."""
    section = pipeline.evaluation
    if section.env is not None:
        return _made(config, section.env)
    environment = _made(config, pipeline.env)
    if isinstance(environment, DividedEnvironment):
        return environment.hold_out(section.prompts)
    if environment.count is not None:
        raise ConfigError(
            f"environment {pipeline.env.name!r} has only {environment.count} prompts and no method hold_out(count): "
            "name another environment in evaluation.env, or give it that method"
        )
    getattr(environment, "close", lambda: None)()  # it was only made to be asked
    seed = pipeline.env.options.get("seed", config.run.seed)
    options = pipeline.env.options | {"seed": draw(int(seed), 0, HELD_OUT) & 0x7FFF_FFFF}  # type: ignore[arg-type]
    return _made(config, pipeline.env.model_copy(update={"options": options}))


def _made(config: Config, section: EnvSection) -> Any:
    """What the environment's own code raises is the user's to fix, so it becomes a `ConfigError`."""
    sys.path[:0] = [str(path) for path in config.run.extra_path]
    try:
        return make_environment(section.name, environment_options(section, config.run.seed))
    except PenstockError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"environment {section.name!r} could not be made: {type(error).__name__}: {error}") from error
