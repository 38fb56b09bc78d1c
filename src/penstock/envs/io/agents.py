"""Agents as environments: code that calls an OpenAI-compatible endpoint and returns its reward.

    async def agent(base_url, api_key, position, seed): ...      # or a plain function; parameters by name, all optional
    command = ["python", "agent.py"]                             # or a program; its last line of output is the reward

All calls that an agent makes with its key are recorded as its sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import shlex
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from penstock.envs.io.programs import Program
from penstock.envs.io.variables import passed_variables
from penstock.envs.protocol import Prompt
from penstock.envs.rewards import is_async
from penstock.errors import ConfigError, PeerLost
from penstock.runtime.loops import start_loop
from penstock.runtime.named import load_callable, takes
from penstock.runtime.process import exit_cause
from penstock.runtime.stacks import task_location, thread_location, traceback_location

log = logging.getLogger(__name__)

OUTPUT_CHARACTERS = 1500
CANCEL_S = 1.0
"""A coroutine has this time to end after it was cancelled at its deadline."""
BLOCKED_S = 2.0
"""A loop that does not answer for this long is blocked."""
MOST_BLOCKED = 32
"""Event loops that agents may leave blocked: each keeps a thread."""


class AgentResult(msgspec.Struct, frozen=True):
    """The result of an agent's episode."""

    reward: float
    parts: dict[str, float] = {}
    """Rewards and metrics by name, for the metrics of the run."""
    session: str = ""
    """If not empty: the sample has only the calls with this `X-Session-ID`; the others are of other agents."""


class LoopBlocked(Exception):
    """Another episode blocked the event loop of this one: it can be started again, on a new loop."""


class AgentLate(Exception):
    """An episode did not end in time. The message says where it stood."""


class _Running(msgspec.Struct, eq=False):
    """One episode in progress."""

    thread: int
    """The thread of `play`."""
    cancelled: bool = False
    program: Program | None = None
    loop: asyncio.AbstractEventLoop | None = None
    loop_thread: int = 0
    task: asyncio.Task[Any] | None = None
    ended: Future[Any] | None = None
    """Its result, if it is a coroutine."""


class Agent:
    """One episode per position: a run of the agent, which returns the reward.

    A coroutine over its deadline is cancelled, a program is killed with its process group. A plain function cannot be
    stopped: the caller of `play` has to leave it behind.
    """

    def __init__(
        self,
        *,
        function: str = "",
        command: Sequence[str] = (),
        count: int | None = None,
        alphabet: str | None = None,
        timeout_s: float = 600.0,
        pass_env: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        """`pass_env` names variables that a `command` sees beside `penstock.envs.io.variables.PASSED`."""
        if bool(function) == bool(command):
            raise ConfigError("an agent is either a `function` or a `command`: give one of the two in env.options")
        self.function = load_callable("agent", function) if function else None
        self.command = [*command]
        self._variables = passed_variables(pass_env)
        self.name = f"agent {function or shlex.join(command)!r}"
        self.count = count
        self.timeout_s = timeout_s
        self.seed = seed
        self._lock = threading.Lock()
        self._running: dict[str, _Running] = {}
        """By key of the episode."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._blocked: list[asyncio.AbstractEventLoop] = []
        if alphabet is not None:
            self.alphabet = alphabet

    def prompt(self, position: int) -> Prompt:
        return Prompt(text=f"agent {position}", columns={})

    def score(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        raise ConfigError("an agent returns its own reward: env.rewards cannot be used with it")

    def play(self, base_url: str, api_key: str, position: int) -> AgentResult:
        """One complete episode. Blocks; the agent's exceptions propagate. Raises LoopBlocked if it can be started
        again, PeerLost if too many hang."""
        available = {"base_url": base_url, "api_key": api_key, "position": position, "seed": self.seed}
        running = _Running(threading.get_ident())
        with self._lock:
            self._running[api_key] = running
        try:
            if self.function is None:
                return AgentResult(self._run_command(running, available))
            arguments = {name: value for name, value in available.items() if takes(self.function, name)}
            if is_async(self.function):
                return AgentResult(_reward(self._await(running, self.function(**arguments))))
            return AgentResult(_reward(self.function(**arguments)))
        finally:
            with self._lock:
                del self._running[api_key]

    def cancel(self, api_key: str) -> None:
        """Ends an episode whose result is no longer used, if it can be ended. Any thread."""
        with self._lock:
            if (running := self._running.get(api_key)) is None:
                return
            running.cancelled = True
            if running.program is not None:
                running.program.cancel()
            if running.loop is not None and running.task is not None and not running.loop.is_closed():
                running.loop.call_soon_threadsafe(running.task.cancel)

    def location(self, api_key: str) -> str:
        """The line of its code at which an episode stands, as `, at agent.py:12 play`; empty if it is not known."""
        with self._lock:
            running = self._running.get(api_key)
        return "" if running is None else _location(running)

    def close(self) -> None:
        """Kills the programs that run, and ends the event loop."""
        with self._lock:
            for running in self._running.values():
                running.cancelled = True
                if running.program is not None:
                    running.program.kill()
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop = None

    # -- coroutines: all on one loop, so that they can share connections -----------------------------------------------

    def _await(self, running: _Running, coroutine: Coroutine[Any, Any, Any]) -> Any:
        ended = running.ended = Future()
        with self._lock:
            self._blocked = [loop for loop in self._blocked if not loop.is_closed()]
            if len(self._blocked) >= MOST_BLOCKED:
                coroutine.close()
                raise PeerLost(f"{self.name} blocks {len(self._blocked)} event loops, and threads cannot be stopped")
            if self._loop is None:
                self._loop = start_loop("agents")
            running.loop = self._loop
            running.loop.call_soon_threadsafe(self._begin, running, coroutine)
        try:
            return ended.result(self.timeout_s + CANCEL_S)
        except TimeoutError:
            if ended.done():
                return ended.result()
        answers = threading.Event()
        with contextlib.suppress(RuntimeError):  # the loop has closed
            running.loop.call_soon_threadsafe(answers.set)
        if not answers.wait(BLOCKED_S):
            self._give_up_loop(running)
            return ended.result(BLOCKED_S)
        stands = _location(running)
        raise AgentLate(f"did not end within {self.timeout_s:g} s, and continues although it was cancelled{stands}")

    def _begin(self, running: _Running, coroutine: Coroutine[Any, Any, Any]) -> None:
        with self._lock:
            running.loop_thread = threading.get_ident()
            wanted = not running.cancelled and running.ended is not None and not running.ended.done()
            if wanted:
                running.task = asyncio.get_running_loop().create_task(self._run_bounded(running, coroutine))
        if not wanted:
            coroutine.close()
            self._end(running, None, InterruptedError("the episode was cancelled before it was started"))

    async def _run_bounded(self, running: _Running, coroutine: Coroutine[Any, Any, Any]) -> None:
        returned, failure = None, None
        deadline = asyncio.timeout(self.timeout_s)
        try:
            async with deadline:
                returned = await coroutine
        except TimeoutError as error:
            where = traceback_location((error.__cause__ or error).__traceback__)
            failure = AgentLate(f"did not end within {self.timeout_s:g} s{where}") if deadline.expired() else error
        except Exception as error:  # noqa: BLE001 - raised where the episode is awaited
            failure = error
        except BaseException as error:  # noqa: BLE001 - an exit would end the loop, and so all episodes on it
            failure = RuntimeError(f"the agent raised {type(error).__name__}: {error}")
            failure.__cause__ = error
        self._end(running, returned, failure)

    def _end(self, running: _Running, returned: Any, failure: BaseException | None) -> None:
        with self._lock:
            assert running.ended is not None
            if running.ended.done():
                return
            if failure is not None:
                running.ended.set_exception(failure)
            else:
                running.ended.set_result(returned)

    def _give_up_loop(self, late: _Running) -> None:
        """Ends all episodes on a loop that is blocked: the one that blocks it with its line of code, or `late` if that
        one is not known; the others can be started again. The loop ends if it continues."""
        loop = late.loop
        assert loop is not None
        with self._lock:
            if loop in self._blocked:
                return  # all that were on it have ended
            self._blocked.append(loop)
            if self._loop is loop:
                self._loop = None
            stuck = [one for one in self._running.values() if one.loop is loop]
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(loop.stop)
        current = asyncio.current_task(loop)
        guilty = next((one for one in stuck if one.task is not None and one.task is current), late)
        where = thread_location(late.loop_thread) if late.loop_thread else ""
        log.warning("%s blocked its event loop%s; it must await, or be a plain function", self.name, where)
        for one in stuck:
            blocked = f"blocked its event loop for longer than it may{where}; it must await, or be a plain function"
            self._end(one, None, AgentLate(blocked) if one is guilty else LoopBlocked(f"another episode {blocked}"))

    # -- programs ------------------------------------------------------------------------------------------------------

    def _run_command(self, running: _Running, available: dict[str, Any]) -> float:
        variables = {
            "OPENAI_BASE_URL": available["base_url"],
            "OPENAI_API_KEY": available["api_key"],
            "PENSTOCK_POSITION": str(available["position"]),
            "PENSTOCK_SEED": str(available["seed"]),
        }
        program = Program(self.command, self._variables | variables)
        with self._lock:  # not while it starts: the worker's loop takes this lock
            running.program = program
            if running.cancelled:
                program.cancel()
        try:
            ended = program.run(self.timeout_s)
        except TimeoutError as error:
            raise AgentLate(str(error)) from None
        if ended.exit_code:
            last = ended.errors[-OUTPUT_CHARACTERS:]
            raise RuntimeError(f"the agent ended with {exit_cause(ended.exit_code)}: {last}")
        return _reward(next(iter(reversed(ended.output.split())), None))

    def __repr__(self) -> str:
        return f"Agent({self.name!r}, running={len(self._running)}, blocked_loops={len(self._blocked)})"


def _location(running: _Running) -> str:
    if running.program is not None:
        return ""
    return task_location(running.task) if running.task is not None else thread_location(running.thread)


def _reward(returned: Any) -> float:
    try:
        reward = float(returned)
    except (TypeError, ValueError):
        raise ValueError(f"an agent must return its reward, a number; it returned {returned!r}") from None
    if not math.isfinite(reward):
        raise ValueError(f"an agent must return a finite reward; it returned {reward}")
    return reward
