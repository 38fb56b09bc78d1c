"""Prompts and rewards that are computed in separate processes, for environments that compute them in Python.

Threads overlap only work that releases the GIL. A prompt that computes for long in Python delays generation, unless
another process computes it. Every such process makes the environment once.
"""

from __future__ import annotations

import logging
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.config.load import load
from penstock.envs.registry import rubric_of
from penstock.envs.rewards import Rubric
from penstock.roles.environments import environment_of, evaluation_environment_of
from penstock.rollout.io.preparation_pool import PreparationPool
from penstock.runtime.parent import watch_parent

log = logging.getLogger(__name__)

_environment: Any = None
"""The environment of a pool process."""


MEASURED_PROMPTS = 8
LONG_S = 0.005
"""CPU time of one prompt: less is not worth sending it to another process."""


class PromptsByCpuTime:
    """The same environment. Prompts are read here until their measured CPU time is long, then in another process.

    If the other process cannot be started, or cannot send its prompts, they are read here as before.
    """

    def __init__(self, environment: Any, elsewhere: Callable[[], PromptsInOtherProcess]) -> None:
        """`elsewhere` is called on a separate thread, while generation continues."""
        self._environment = environment
        self._make = elsewhere
        self._elsewhere: PromptsInOtherProcess | None = None
        self._starting: threading.Thread | None = None
        self._spent: deque[float] = deque(maxlen=MEASURED_PROMPTS)

    def prompt(self, position: int) -> Any:
        elsewhere = self._elsewhere
        if elsewhere is not None:
            return elsewhere.prompt(position)
        began = time.thread_time()  # CPU time of this thread: waits for a disk overlap already
        prompt = self._environment.prompt(position)
        self._spent.append(time.thread_time() - began)
        if self._starting is None and len(self._spent) == MEASURED_PROMPTS and statistics.median(self._spent) >= LONG_S:
            self._starting = threading.Thread(target=self._move, args=(position,), name="preparation", daemon=True)
            self._starting.start()
        return prompt

    def _move(self, position: int) -> None:
        try:
            elsewhere = self._make()
            elsewhere.prompt(position)
        except Exception as error:  # noqa: BLE001 - after any error, prompts can be read here
            log.warning(
                "prompts take long to compute, but are still read in this process: %s: %s", type(error).__name__, error
            )
            return
        log.info("a prompt takes %.3f s of CPU time: prompts are read in a separate process", max(self._spent))
        self._elsewhere = elsewhere

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)


class PromptsInOtherProcess:
    """The same environment, but `prompt` runs in other processes. A prompt must be picklable."""

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
