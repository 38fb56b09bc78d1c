"""Checks that need more than the file: do the things it names exist? Loads no torch and starts nothing."""

from __future__ import annotations

import sys

from penstock.config.pipeline import PathModel, PipelineSection
from penstock.config.run import Config
from penstock.envs.registry import check_options, find_environment, find_reward, load
from penstock.errors import ConfigError
from penstock.runtime.sinks import check_sink


def check_environment(config: Config) -> None:
    """Raises `ConfigError` for an environment, reward, filter, model path, workload or sink that cannot be found."""
    sys.path[:0] = [str(path) for path in config.run.extra_path]
    for sink in config.metrics.sinks:
        check_sink(sink)
    for pipeline in config.pipeline:
        try:
            _check(pipeline)
        except ConfigError as error:
            raise ConfigError(f"pipeline {pipeline.name!r}: {error}") from error


def _check(pipeline: PipelineSection) -> None:
    check_options(
        f"environment {pipeline.env.name!r}",
        find_environment(pipeline.env.name),
        environment_options(pipeline, seed=0),
    )
    if pipeline.kind == "gymnasium":
        _check_gymnasium(str(pipeline.env.options.get("id", "")))
    for reward in pipeline.env.rewards:
        find_reward(reward)
    for path in [pipeline.rollout.workload, pipeline.train.advantage, *pipeline.train.filters]:
        if path is not None and ":" in path:
            load(path)
    if isinstance(pipeline.model, PathModel) and not pipeline.model.path.is_dir():
        raise ConfigError(f"model.path {str(pipeline.model.path)!r} is not a directory; expected a saved model")


def environment_options(pipeline: PipelineSection, seed: int) -> dict[str, object]:
    """What the environment is built with: the user's options, and the run's seed unless they give their own."""
    return {"seed": seed, **pipeline.env.options}


def _check_gymnasium(name: str) -> None:
    import gymnasium

    try:
        gymnasium.spec(name)
    except gymnasium.error.Error as error:
        raise ConfigError(f"env.options.id: {error}") from error
