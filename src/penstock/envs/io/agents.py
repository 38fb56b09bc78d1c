"""Agents as environments: code that calls an OpenAI-compatible endpoint and returns its reward.

    async def agent(base_url, api_key, position, seed): ...      # or a plain function; parameters by name, all optional
    command = ["python", "agent.py"]                             # or a program; its last line of output is the reward

All calls that an agent makes with its key are recorded as its sample.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.envs.protocol import Prompt
from penstock.errors import ConfigError
from penstock.runtime.named import load_callable, takes

OUTPUT_CHARACTERS = 1500


class AgentResult(msgspec.Struct, frozen=True):
    """The result of an agent's episode."""

    reward: float
    parts: dict[str, float] = {}
    """Rewards and metrics by name, for the metrics of the run."""
    session: str = ""
    """If not empty: the sample has only the calls with this `X-Session-ID`; the others are of other agents."""


class Agent:
    """One episode per position: a run of the agent, which returns the reward."""

    def __init__(
        self,
        *,
        function: str = "",
        command: Sequence[str] = (),
        count: int | None = None,
        alphabet: str | None = None,
        timeout_s: float = 600.0,
        seed: int = 0,
    ) -> None:
        if bool(function) == bool(command):
            raise ConfigError("an agent is either a `function` or a `command`: give one of the two in env.options")
        self.function = load_callable("agent", function) if function else None
        self.command = [*command]
        self.count = count
        self.timeout_s = timeout_s
        self.seed = seed
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        if alphabet is not None:
            self.alphabet = alphabet

    def prompt(self, position: int) -> Prompt:
        return Prompt(text=f"agent {position}", columns={})

    def score(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        raise ConfigError("an agent returns its own reward: env.rewards cannot be used with it")

    def play(self, base_url: str, api_key: str, position: int) -> AgentResult:
        """One complete episode. Blocks; the agent's exceptions propagate."""
        available = {"base_url": base_url, "api_key": api_key, "position": position, "seed": self.seed}
        if self.function is None:
            return AgentResult(self._run_command(available))
        arguments = {name: value for name, value in available.items() if takes(self.function, name)}
        if inspect.iscoroutinefunction(self.function):
            playing = _bounded(self.function(**arguments), self.timeout_s)
            returned = asyncio.run_coroutine_threadsafe(playing, self._shared_loop()).result()
        else:
            returned = self.function(**arguments)
        return AgentResult(_reward(returned))

    def _shared_loop(self) -> asyncio.AbstractEventLoop:
        """The one loop of all episodes of an `async def` agent, so that they can share connections."""
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="agents", daemon=True).start()
            return self._loop

    def _run_command(self, available: dict[str, Any]) -> float:
        variables = {
            "OPENAI_BASE_URL": available["base_url"],
            "OPENAI_API_KEY": available["api_key"],
            "PENSTOCK_POSITION": str(available["position"]),
            "PENSTOCK_SEED": str(available["seed"]),
        }
        # subprocess.run kills the program at its deadline.
        variables = os.environ | variables
        ended = subprocess.run(
            self.command, env=variables, capture_output=True, text=True, timeout=self.timeout_s, check=False
        )
        if ended.returncode:
            last = ended.stderr[-OUTPUT_CHARACTERS:]
            raise RuntimeError(f"the agent ended with exit code {ended.returncode}: {last}")
        return _reward(next(iter(reversed(ended.stdout.split())), None))

    def __repr__(self) -> str:
        return f"Agent({self.function or self.command})"


async def _bounded(playing: Any, timeout_s: float) -> Any:
    async with asyncio.timeout(timeout_s):
        return await playing


def _reward(returned: Any) -> float:
    try:
        return float(returned)
    except (TypeError, ValueError):
        raise ValueError(f"an agent must return its reward, a number; it returned {returned!r}") from None
