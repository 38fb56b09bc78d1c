"""From the user's configuration to environments: the one to train on, and the one to evaluate on. Loads no torch."""

from __future__ import annotations

from typing import Any

from penstock.config.check import check_step_fits, made
from penstock.config.pipeline import PipelineSection
from penstock.config.run import Config
from penstock.envs.cursor import draw
from penstock.envs.protocol import DividedEnvironment, prompts_per_pass
from penstock.errors import ConfigError

HELD_OUT = 1
"""Purpose of the draw that derives the evaluation seed from the training seed."""


def environment_of(config: Config, pipeline: PipelineSection) -> Any:
    """The environment to train on, without the prompts held out for evaluation."""
    environment = made(config, pipeline, pipeline.env)
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
    """Prompts that are never trained on: the user's other environment, rows kept out of this one, or another seed."""
    environment = _held_out(config, pipeline)
    prompts, requested = prompts_per_pass(environment), pipeline.evaluation.prompts
    if prompts is not None and prompts < requested:
        _close(environment)
        raise ConfigError(
            f"evaluation.prompts is {requested}, but there are only {prompts} prompts to evaluate on: lower it, or "
            "name another environment in evaluation.env"
        )
    return environment


def _held_out(config: Config, pipeline: PipelineSection) -> Any:
    section = pipeline.evaluation
    if section.env is not None:
        return made(config, pipeline, section.env)
    environment = made(config, pipeline, pipeline.env)
    if isinstance(environment, DividedEnvironment):
        return environment.hold_out(section.prompts)
    prompts = prompts_per_pass(environment)
    _close(environment)  # it was made only to read its size
    if prompts is not None:
        raise ConfigError(
            f"environment {pipeline.env.name!r} has only {prompts} prompts and no method hold_out(count): "
            "name another environment in evaluation.env, or give it that method"
        )
    seed = pipeline.env.options.get("seed", config.run.seed)
    options = pipeline.env.options | {"seed": draw(int(seed), 0, HELD_OUT) & 0x7FFF_FFFF}  # type: ignore[arg-type]
    return made(config, pipeline, pipeline.env.model_copy(update={"options": options}))


def _close(environment: Any) -> None:
    getattr(environment, "close", lambda: None)()


def sample_bytes_of(pipeline: PipelineSection, environment: Any) -> int:
    """The largest size of a sample. Raises `ConfigError` if a step of such samples does not fit into shared memory."""
    size = getattr(environment, "sample_bytes", None) or pipeline.sample_bytes
    check_step_fits(pipeline, size)
    return size
