"""Prompts read and rewards computed in processes of their own, for environments that compute them in Python.

Threads overlap what releases the interpreter. A prompt that takes real computing in Python holds up generation
instead, unless another process computes it; every such process makes the environment once, for itself.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from penstock.config.load import load
from penstock.envs.registry import rubric_of
from penstock.envs.rewards import Rubric
from penstock.roles.environments import environment_of, evaluation_environment_of
from penstock.rollout.io.preparation_pool import PreparationPool
from penstock.runtime.process import watch_parent

_environment: Any = None
"""Of a process of the pool."""


class PromptsElsewhere:
    """The same environment, but for `prompt`, which is asked in other processes. A prompt must be picklable."""

    def __init__(self, environment: Any, config_path: Path, pipeline: str, processes: int) -> None:
        self._environment = environment
        self._pool = PreparationPool(processes, begin=_begin, arguments=(config_path, pipeline, os.getpid()))

    def prompt(self, position: int) -> Any:
        return self._pool.run(_prompt, position)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)


def make_rubric(config_path: Path, name: str, evaluation: bool = False) -> Rubric:
    """The rubric of a pipeline, in a process that runs reward functions."""
    config = load(config_path)
    pipeline = next(section for section in config.pipeline if section.name == name)
    section = (pipeline.evaluation.env if evaluation else None) or pipeline.env
    environment = (evaluation_environment_of if evaluation else environment_of)(config, pipeline)
    return rubric_of(section, environment)


def _begin(config_path: Path, name: str, parent: int) -> None:
    global _environment
    watch_parent(parent)
    config = load(config_path)
    pipeline = next(section for section in config.pipeline if section.name == name)
    _environment = environment_of(config, pipeline)


def _prompt(position: int) -> Any:
    return _environment.prompt(position)
