"""Checks that need more than the file: do the things it names exist? Loads no torch and starts nothing."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from typing import Any

from penstock.batch import advantage, filters
from penstock.config.pipeline import PipelineSection
from penstock.config.run import Config
from penstock.engines.settings import PathModel
from penstock.envs.conformity import check_class, check_counted, check_text_environment
from penstock.envs.registry import check_options, find_environment, find_reward, make_environment, scoring_of
from penstock.envs.settings import EnvSection
from penstock.errors import ConfigError, PenstockError
from penstock.payload.io.mapping import DIRECTORY
from penstock.rollout.hooks import Workload
from penstock.runtime.named import check_call, check_call_begins, check_methods, described, load_callable, takes
from penstock.runtime.sinks import check_sink
from penstock.train.losses.tokens import NAMED as LOSSES


def check_environment(config: Config) -> None:
    """Raises `ConfigError` for an environment, reward, advantage, filter, workload, model or sink that is not there."""
    sys.path[:0] = [str(path) for path in config.run.extra_path]
    for sink in config.metrics.sinks:
        check_sink(sink)
    for pipeline in config.pipeline:
        try:
            _check(pipeline)
        except ConfigError as error:
            raise ConfigError(f"pipeline {pipeline.name!r}: {error}") from error
    if config.launch.kind == "local":  # elsewhere each machine has shared memory of its own
        _check_shared_memory()
        _check_packages(config)
        for pipeline in config.pipeline:
            check_step_fits(pipeline, pipeline.sample_bytes)


def check_by_making(config: Config) -> None:
    """What shows only in an environment that is made: its first prompt, the size of its episodes. Those that start
    programs of their own are left to the run."""
    for pipeline in config.pipeline:
        if pipeline.env.name.startswith("verifiers:"):
            continue
        environment = made(config, pipeline, pipeline.env)
        try:
            if config.launch.kind == "local":
                check_step_fits(pipeline, getattr(environment, "sample_bytes", None) or 0)
        finally:
            getattr(environment, "close", lambda: None)()


def made(config: Config, pipeline: PipelineSection, section: EnvSection) -> Any:
    """What the environment's own code raises is the user's to fix, so it becomes a `ConfigError`."""
    sys.path[:0] = [str(path) for path in config.run.extra_path]
    owner = f"environment {section.name!r}"
    try:
        environment = make_environment(section.name, environment_options(section, config.run.seed))
    except PenstockError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{owner} could not be made: {described(error)}") from error
    check_counted(owner, environment)
    if pipeline.kind == "language" and pipeline.rollout.workload is None:
        converses = pipeline.rollout.max_turns > 1 and hasattr(environment, "reply")
        check_text_environment(owner, environment, scoring_of(owner, pipeline.env, environment), converses=converses)
    return environment


def check_step_fits(pipeline: PipelineSection, sample_bytes: int) -> None:
    """The samples of a batch wait in shared memory until it is complete: one that does not fit would never be."""
    needed, size = pipeline.step_samples * sample_bytes, os.statvfs(DIRECTORY)
    there = size.f_blocks * size.f_frsize
    if there and needed > there:
        keys = "rollout.max_new_tokens" if pipeline.kind == "language" else "env.options.max_episode_steps"
        raise ConfigError(
            f"pipeline {pipeline.name!r}: a step of {pipeline.step_samples} samples may take {needed >> 20} MiB of "
            f"shared memory, and {DIRECTORY} has {there >> 20} MiB: the step would never be complete. Make it larger "
            f"(in a container: --shm-size), or lower train.groups_per_step, rollout.group_size or {keys}"
        )


def _check_shared_memory() -> None:
    if not os.access(DIRECTORY, os.W_OK | os.X_OK):
        raise ConfigError(
            f"this user cannot make files in {DIRECTORY}, or it is not there: finished samples wait in that shared "
            "memory for the trainer"
        )


def _check_packages(config: Config) -> None:
    """What the configuration needs of the extras: here, before a process misses it."""
    needed = [("payload.transport = 'ucxx'", "ucxx", "ucxx")] if config.payload.transport == "ucxx" else []
    for pipeline in config.pipeline:
        if pipeline.lora is not None:
            needed.append(("[pipeline.lora]", "peft", "lora"))
        if pipeline.engine.needs is not None:
            what, package = pipeline.engine.needs
            needed.append((what, package, package))
        if "math_verify" in pipeline.env.rewards:
            needed.append(("reward 'math_verify'", "math_verify", "data"))
    for what, package, extra in needed:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{what} needs the package {package}: pip install 'penstock[{extra}]'")


def _check(pipeline: PipelineSection) -> None:
    for section in (pipeline.env, pipeline.evaluation.env):
        if section is not None:
            _check_environment(section, shows_text=pipeline.kind == "language" and pipeline.rollout.workload is None)
    if pipeline.train.loss not in LOSSES:
        check_call(
            f"loss {pipeline.train.loss!r}", load_callable("loss", pipeline.train.loss, LOSSES), "tokens", "settings"
        )
    chosen = pipeline.train.advantage
    function = advantage.resolve(chosen)
    told = {name: None for name in advantage.TOLD if takes(function, name)}
    check_call(f"advantage {chosen!r}", function, "rewards", "group_sizes", **told)
    for name in pipeline.train.filters:
        check_call(f"filter {name!r}", filters.resolve(name), "rewards", "lengths")
    if pipeline.rollout.workload is not None:
        _check_workload(pipeline.rollout.workload)
    if isinstance(pipeline.model, PathModel) and not pipeline.model.path.is_dir():
        raise ConfigError(
            f"model.path {str(pipeline.model.path)!r} is not a directory; expected a saved model. A model of the "
            "Hugging Face hub is written kind = 'hub' with its name"
        )
    if pipeline.train.teacher is not None and not pipeline.train.teacher.is_dir():
        raise ConfigError(f"train.teacher {str(pipeline.train.teacher)!r} is not a directory; expected a saved model")


def _check_workload(name: str) -> None:
    owner, workload = f"workload {name!r}", load_callable("workload", name)
    check_call(owner, workload, "environment", "engine", "policy")
    if isinstance(workload, type):
        check_methods(owner, workload, Workload)


def _check_environment(section: EnvSection, *, shows_text: bool) -> None:
    owner, factory = f"environment {section.name!r}", find_environment(section.name)
    if "seed" not in section.options and not takes(factory, "seed"):
        raise ConfigError(f"{owner} must take the run's seed: def __init__(self, seed=0, …)")
    check_options(owner, factory, environment_options(section, seed=0))
    if shows_text:
        check_class(owner, factory, scores=not section.rewards)
    if section.name == "gymnasium":
        _check_gymnasium(str(section.options.get("id", "")))
    for reward in section.rewards:
        check_call_begins(f"reward {reward!r}", find_reward(reward), "prompts", "completions")
    if factory is find_environment("dataset"):  # it only opens files, and finds what is wrong with the first row
        with contextlib.closing(factory(**environment_options(section, seed=0))) as dataset:
            check_text_environment(owner, dataset, scoring_of(owner, section, dataset), converses=False)


def environment_options(section: EnvSection, seed: int) -> dict[str, object]:
    """What the environment is built with: the user's options, and the run's seed unless they give their own."""
    return {"seed": seed, **section.options}


def _check_gymnasium(name: str) -> None:
    """As gymnasium itself reads it: `module:Id` imports the module first, which registers the environment."""
    import gymnasium

    module, _, registered = name.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        gymnasium.spec(registered)
    except (gymnasium.error.Error, ImportError) as error:
        raise ConfigError(f"env.options.id {name!r}: {error}") from error
