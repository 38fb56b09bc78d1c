"""Environments of the package verifiers, as `env.name = "verifiers:ID"`.

verifiers pins its dependencies, so it may be installed in a separate environment. A process of that interpreter runs
the episodes (`verifiers_bridge.py`); its agents request completions from the worker's endpoint, as all agents do.
"""

from __future__ import annotations

import atexit
import copy
import functools
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from penstock.envs.cursor import Cursor
from penstock.envs.io.agents import AgentResult
from penstock.envs.io.variables import passed_variables
from penstock.envs.protocol import Prompt
from penstock.errors import ConfigError
from penstock.runtime.interpreter import python_command
from penstock.runtime.process import exit_cause

START_S = 300.0
"""Timeout for an environment to load its tasks."""
ANSWER_S = 5.0
"""Wait for a result beyond the episode's own deadline."""
LETTERS = "".join(map(chr, range(32, 127))) + "\n"


class Verifiers:
    """Each position is a task, or, if several agents are trained, a task and the agent that is trained on it; the
    others take part untrained. If that agent made no call, the next one that did is trained. The reward is the agent's
    reward in verifiers."""

    def __init__(
        self,
        *,
        id: str,
        python: str = "",
        path: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
        agents: Sequence[str] = (),
        shuffle: bool = True,
        alphabet: str = LETTERS,
        timeout_s: float = 600.0,
        pass_env: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        """`python` is the interpreter that has verifiers, this one if empty. `path` are directories with the packages
        of environments that are not installed there. `config` is the environment's own configuration, `agents` which of
        its agents are trained: all that play with the trained model, if empty. `pass_env` names variables that the
        process sees beside `penstock.envs.io.variables.PASSED`, such as the key of a judge."""
        if not python and importlib.util.find_spec("verifiers") is None:
            raise ConfigError(
                f"environment 'verifiers:{id}' needs the package verifiers. It pins its dependencies, so install it in "
                "a separate environment (python -m venv verifiers; verifiers/bin/pip install verifiers uv), and name "
                "its interpreter in env.options.python"
            )
        self.id = id
        self.name = f"agent 'verifiers:{id}'"
        self.alphabet = alphabet
        self.timeout_s = timeout_s
        settings = json.dumps({"id": id, "config": config or {}})
        places = tuple(str(Path(one).resolve()) for one in path)
        self._bridge = _bridge(python or sys.executable, settings, places, tuple(pass_env))
        rows, trainable = self._bridge.described()
        unknown = [agent for agent in agents if agent not in trainable]
        if unknown or not trainable:
            raise ConfigError(
                f"environment 'verifiers:{id}' trains no agent {unknown[0] if unknown else ''!r}; it has "
                f"{', '.join(trainable) or 'none that plays with the trained model'}"
            )
        self.agents = [*agents] or trainable
        self.cursor = Cursor(rows, seed, shuffle=shuffle) if rows is not None else None
        self.first_row = 0

    @property
    def count(self) -> None:
        return None

    @property
    def rows(self) -> int | None:
        """Positions of one pass; None if the tasks never end."""
        return None if self.cursor is None else self.cursor.rows * len(self.agents)

    def hold_out(self, count: int) -> Verifiers:
        """The last tasks, or the first of an endless taskset; removes them from this environment."""
        tasks, held_out, cursor = -(-count // len(self.agents)), copy.copy(self), self.cursor
        if cursor is None:
            held_out.cursor = Cursor(tasks, 0, shuffle=False)
            self.first_row += tasks
            return held_out
        left = cursor.rows - tasks
        if left < 1:
            raise ConfigError(
                f"environment 'verifiers:{self.id}' has {cursor.rows} tasks; {tasks} of them cannot be kept for "
                "evaluation"
            )
        held_out.first_row, held_out.cursor = self.first_row + left, Cursor(tasks, cursor.seed, shuffle=False)
        self.cursor = Cursor(left, cursor.seed, shuffle=cursor.shuffle)
        return held_out

    def prompt(self, position: int) -> Prompt:
        return Prompt(text=f"{self.id} {position}")

    def score(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        raise ConfigError("rewards come from verifiers: env.rewards cannot be used with it")

    def play(self, base_url: str, api_key: str, position: int) -> AgentResult:
        """One complete episode. Blocks."""
        task, agent = divmod(position, len(self.agents))
        return self._bridge.play(
            base_url=base_url,
            api_key=api_key,
            row=self.first_row + (task if self.cursor is None else self.cursor.row(task)),
            agents=[*self.agents[agent:], *self.agents[:agent]],
            timeout_s=self.timeout_s,
        )

    def __repr__(self) -> str:
        return f"Verifiers({self.id!r}, {', '.join(self.agents)}, {self.cursor or 'endless'})"


@functools.cache
def _bridge(python: str, settings: str, path: tuple[str, ...], pass_env: tuple[str, ...]) -> _Bridge:
    """Environments for training and for evaluation share a process."""
    return _Bridge(python, settings, path, pass_env)


class _Bridge:
    """The process that runs the episodes; starts another one if it has ended."""

    def __init__(self, python: str, settings: str, path: tuple[str, ...], pass_env: tuple[str, ...]) -> None:
        # Not this interpreter's PYTHONPATH. The process and its children, such as tool servers, need `path`.
        self._variables = passed_variables(pass_env) | {"PYTHONPATH": os.pathsep.join(path)}
        script = Path(__file__).with_name("verifiers_bridge.py")
        self._command = python_command(str(script), settings, interpreter=python)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._description: Future[dict[str, Any]] = Future()
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._number = 0

    def described(self) -> tuple[int | None, list[str]]:
        """The number of tasks, None if they never end, and the agents that can be trained."""
        with self._lock:
            description = self._running()
        try:
            found = description.result(START_S)
        except TimeoutError:
            raise ConfigError(f"verifiers did not load the environment within {START_S:.0f} s") from None
        except RuntimeError as error:
            raise ConfigError(str(error)) from error
        if "failure" in found:
            raise ConfigError(f"verifiers cannot load the environment: {found['failure']}")
        return found["rows"], found["agents"]

    def play(self, **request: Any) -> AgentResult:
        response: Future[dict[str, Any]] = Future()
        with self._lock:
            self._running()
            assert self._process is not None
            assert self._process.stdin is not None
            self._number += 1
            number = self._number
            self._waiting[number] = response
            try:
                self._process.stdin.write(json.dumps({"number": number, **request}) + "\n")
                self._process.stdin.flush()
            except OSError as error:
                del self._waiting[number]
                raise RuntimeError(f"the process of verifiers has ended: {error}") from error
        try:
            found = response.result(request["timeout_s"] + ANSWER_S)
        finally:
            self._waiting.pop(number, None)
        if "error" in found:
            raise RuntimeError(found["error"])
        return AgentResult(found["reward"], found["parts"], found["session"])

    def _running(self) -> Future[dict[str, Any]]:
        """Starts the process if there is none; returns its first message."""
        if self._process is None or self._process.poll() is not None:
            try:
                # It logs to the worker's log. It ends when its input ends, so with this process.
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._variables
                )
            except OSError as error:
                raise ConfigError(f"env.options.python {self._command[0]!r} cannot be started: {error}") from error
            self._description = Future()
            reading = threading.Thread(target=self._receive, args=(self._process, self._description), daemon=True)
            reading.name = "verifiers"
            reading.start()
            atexit.register(_end, self._process)
        return self._description

    def _receive(self, process: subprocess.Popen[str], description: Future[dict[str, Any]]) -> None:
        """Consumes the responses of one process, until it ends; then its pending requests fail."""
        assert process.stdout is not None
        for line in process.stdout:
            found = json.loads(line)
            if "number" not in found:
                description.set_result(found)
            elif (response := self._waiting.pop(found["number"], None)) is not None:
                response.set_result(found)
        reason = RuntimeError(f"the process of verifiers ended with {exit_cause(process.wait())}; see the worker's log")
        if not description.done():
            description.set_exception(reason)
        with self._lock:
            if self._process is process:
                waiting, self._waiting = self._waiting, {}
                for response in waiting.values():
                    response.set_exception(reason)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
