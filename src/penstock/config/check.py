"""Checks that the objects named in a configuration exist and fit. Loads no torch and starts no process."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from penstock.batch import advantage, filters
from penstock.config.pipeline import PipelineSection
from penstock.config.run import Config
from penstock.engines.hub import cached
from penstock.engines.settings import HubModel, PathModel
from penstock.envs.conformity import check_class, check_counted, check_text_environment
from penstock.envs.registry import (
    ENVIRONMENTS,
    check_options,
    find_environment,
    find_reward,
    make_environment,
    scoring_of,
)
from penstock.envs.settings import EnvSection
from penstock.errors import ConfigError, PenstockError
from penstock.payload.io.mapping import DIRECTORY
from penstock.rollout.hooks import Workload
from penstock.runtime.named import check_call, check_methods, described, load_callable, takes
from penstock.runtime.sinks import check_sink
from penstock.train.losses.tokens import NAMED as LOSSES

QUICKLY_MADE = ("penstock.envs.tasks:", "penstock.envs.io.datasets:")
"""Environments that at most open files: they are made to check their first prompt before anything starts."""

LIBRARIES = {"torch", "transformers", "numpy", "safetensors", "uvicorn", "starlette", "psutil", "peft", "vllm", "ray"}
"""Imported later than this check, besides what is imported already."""


def check_environment(config: Config) -> None:
    """Raises `ConfigError` for an environment, reward, advantage, filter, workload, model or sink that is missing."""
    for folder in config.run.extra_path:
        _check_names(folder)
    sys.path[:0] = [str(path) for path in config.run.extra_path]
    for sink in config.metrics.sinks:
        check_sink(sink)
    for pipeline in config.pipeline:
        try:
            _check(pipeline)
        except ConfigError as error:
            raise ConfigError(f"pipeline {pipeline.name!r}: {error}") from error
    if config.launch.kind == "local":  # on a cluster each machine has its own shared memory
        _check_shared_memory()
        _check_packages(config)
        for pipeline in config.pipeline:
            check_step_fits(pipeline, pipeline.sample_bytes)


def _check_names(folder: Path) -> None:
    """Raises `ConfigError` for a module that would replace one of Python or of a library in every process: a file
    `http.py` or `torch.py` in a directory that is searched first."""
    taken = LIBRARIES | sys.modules.keys()
    for path in sorted([*folder.glob("*.py"), *(one.parent for one in folder.glob("*/__init__.py"))]):
        name = path.stem
        if name not in taken or name.startswith("__"):
            continue
        spec = getattr(sys.modules.get(name), "__spec__", None)
        used = Path(getattr(spec, "origin", None) or "/")
        if path.resolve() not in (used.resolve(), used.resolve().parent):
            raise ConfigError(
                f"{path} has the name of a module that all processes import: rename it, or move it out of "
                "run.extra_path"
            )


def check_by_making(config: Config) -> None:
    """Makes each environment to check its first prompt and the size of its episodes. Environments of `verifiers:` start
    programs: the run checks them."""
    for pipeline in config.pipeline:
        if pipeline.env.name.startswith("verifiers:"):
            continue
        environment = made(config, pipeline, pipeline.env)
        try:
            if config.launch.kind == "local":
                check_step_fits(pipeline, getattr(environment, "sample_bytes", None) or 0)
        finally:
            getattr(environment, "close", lambda: None)()


def check_models(config: Config) -> None:
    """Raises `ConfigError` for a language model on this machine that cannot be trained, or not served by its engine.
    Loads transformers, but no weights."""
    for pipeline in config.pipeline:
        try:
            _check_model(pipeline)
        except ConfigError as error:
            raise ConfigError(f"pipeline {pipeline.name!r}: {error}") from error


def _check_model(pipeline: PipelineSection) -> None:
    model = pipeline.model
    if isinstance(model, HubModel):
        directory = cached(model)
    else:
        directory = model.path if isinstance(model, PathModel) and not model.gguf_file else None
    if directory is None:
        return
    transformers = importlib.import_module("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot read the configuration of the model in {str(directory)!r}: {error}") from error
    importlib.import_module("penstock.train.support").check_trained(config)
    importlib.import_module("penstock.engines.build").check_served(pipeline.engine, config)


def made(config: Config, pipeline: PipelineSection, section: EnvSection) -> Any:
    """Makes an environment. Any exception of its code becomes a `ConfigError`, because the user must fix it."""
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
    """Raises `ConfigError` if a batch does not fit into shared memory: its samples wait there until it is complete."""
    needed, size = pipeline.step_samples * sample_bytes, os.statvfs(DIRECTORY)
    available = size.f_blocks * size.f_frsize
    if available and needed > available:
        keys = "rollout.max_new_tokens" if pipeline.kind == "language" else "env.options.max_episode_steps"
        raise ConfigError(
            f"pipeline {pipeline.name!r}: a step of {pipeline.step_samples} samples may take {needed >> 20} MiB of "
            f"shared memory, and {DIRECTORY} has {available >> 20} MiB: the step would never be complete. Make it "
            f"larger (in a container: --shm-size), or lower train.groups_per_step, rollout.group_size or {keys}"
        )


def _check_shared_memory() -> None:
    if not os.access(DIRECTORY, os.W_OK | os.X_OK):
        raise ConfigError(
            f"this user cannot create files in {DIRECTORY}, or it does not exist: finished samples wait in that shared "
            "memory for the trainer"
        )


def _check_packages(config: Config) -> None:
    """Raises `ConfigError` for a package of an extra that is needed and not installed."""
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
            raise ConfigError(f"{what} needs the package {package}: pip install 'penstock-rl[{extra}]'")


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
    optional = {name: None for name in advantage.OPTIONAL_ARGUMENTS if takes(function, name)}
    check_call(f"advantage {chosen!r}", function, "rewards", "group_sizes", **optional)
    for name in pipeline.train.filters:
        check_call(f"filter {name!r}", filters.resolve(name), "rewards", "lengths")
    if pipeline.rollout.workload is not None:
        _check_workload(pipeline.rollout.workload)
    if isinstance(pipeline.model, PathModel) and not pipeline.model.path.is_dir():
        raise ConfigError(
            f"model.path {str(pipeline.model.path)!r} is not a directory; expected a saved model. For a model of "
            "the Hugging Face hub set kind = 'hub' and its name"
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
        find_reward(reward)
    if shows_text and ENVIRONMENTS.get(section.name, section.name).startswith(QUICKLY_MADE):
        environment = factory(**environment_options(section, seed=0))
        try:
            check_text_environment(owner, environment, scoring_of(owner, section, environment), converses=False)
        finally:
            getattr(environment, "close", lambda: None)()


def environment_options(section: EnvSection, seed: int) -> dict[str, object]:
    """Arguments of the environment: the user's options, and the run's seed unless the options contain one."""
    return {"seed": seed, **section.options}


def _check_gymnasium(name: str) -> None:
    """Reads the id as gymnasium does: `module:Id` first imports the module, which registers the environment."""
    import gymnasium

    module, _, registered = name.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        gymnasium.spec(registered)
    except (gymnasium.error.Error, ImportError) as error:
        raise ConfigError(f"env.options.id {name!r}: {error}") from error
