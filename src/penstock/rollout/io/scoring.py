"""Rewards that take time: many groups concurrently, a deadline for each call, and calls that hang are stopped.

Where a reward function runs:

| function               | runs in                                      | over its deadline                      |
|------------------------|----------------------------------------------|----------------------------------------|
| marked `inline`        | the postprocessing thread, at once           | (has none: it takes microseconds)      |
| `async def`            | one event loop in a separate thread          | is cancelled; if it blocks the loop,   |
|                        |                                              | the others continue on a new loop      |
| any other              | threads of the worker, `concurrency` at most | is abandoned; moves into processes     |
| other, `processes` set | that many processes, started when needed     | its process is killed and replaced     |

A thread cannot be stopped, a process can: the first call that misses its deadline in a thread moves all later calls
into processes, unless `processes = 0` forbids them. The samples of a call that missed its deadline have no reward.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from penstock.envs.rewards import Columns, NoReward, Rubric, Scored, Values, awaited_values_of, is_async, values_of
from penstock.envs.settings import RewardSection
from penstock.errors import PenstockError, RunFailed, sentence_of
from penstock.runtime.loops import start_loop
from penstock.runtime.parent import watch_parent
from penstock.runtime.process import exit_cause
from penstock.runtime.stacks import task_location, thread_location
from penstock.wire.messages import REWARD

log = logging.getLogger(__name__)

POLL_EVERY_S = 0.25
REPORT_AFTER_S = 2.0
"""A call that runs for longer is reported as the worker's activity."""
PROCESSES = 8
"""Most processes of functions that moved there because one hung."""
IDLE_S = 60.0
"""An idle thread ends after this time, and its process with it."""
BLOCKED_S = 5.0
"""A coroutine that is not cancelled this long after its deadline is on a loop that is blocked."""
START_S = 300.0
"""A process may take this long to import the reward functions."""


class _Call(msgspec.Struct, eq=False):
    """One call of one function, for one group or for several."""

    function: int
    prompts: Sequence[Any]
    completions: Sequence[str]
    columns: Columns
    values: Future[Values]
    began: float = 0.0
    """0 while it waits for a thread or slot."""
    stoppable: bool = False
    """It can be stopped: it runs in a process, or as a coroutine."""
    abandoned: bool = False
    thread: int = 0
    """Id of its thread, if it runs in a thread of the worker; the loop's, if it is a coroutine."""
    task: asyncio.Task[Any] | None = None
    """Its task, if it is a coroutine."""


class Scoring:
    """Scores groups with a rubric. `score` may be called from any thread."""

    def __init__(
        self,
        rubric: Rubric,
        settings: RewardSection = RewardSection(),
        *,
        elsewhere: tuple[Callable[..., Rubric], tuple[Any, ...]] | None = None,
        all_inline: bool = False,
        progressed: Callable[[str], None] = lambda doing: None,
    ) -> None:
        """`elsewhere` makes the same rubric in another process: a picklable function and its arguments. `all_inline`
        calls every function on the caller's thread."""
        self.rubric = rubric
        self.settings = settings
        self._elsewhere = elsewhere
        self._inline = [all_inline or bool(getattr(function, "inline", False)) for function in rubric.functions]
        self._progressed = progressed
        self._lock = threading.Lock()
        self._waiting: deque[_Call] = deque()
        self._running: set[_Call] = set()
        self._arrived = threading.Condition(self._lock)
        self._threads = 0
        self._idle = 0
        self._abandoned = 0
        self._in_processes = bool(settings.reward_processes) and elsewhere is not None
        self._children: set[_Child] = set()
        self._gathered: dict[int, list[_Call]] = {}
        """For each `batched` function, the calls that wait for the one in flight."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(settings.reward_concurrency)
        self._on_loop: set[_Call] = set()
        """The calls that run on the loop, or wait for one of its slots."""
        self._watching = False
        self._closed = False

    def score(
        self, prompts: Sequence[Any], completions: Sequence[str], columns: Columns
    ) -> list[Scored] | Future[list[Scored]]:
        """One `Scored` per completion: at once if all functions are inline, else a future of them.

        A function that breaks its contract raises RunFailed, here or in the future.
        """
        rubric = self.rubric
        calls: list[Future[Values]] = []
        for index, (name, function) in enumerate(zip(rubric.names, rubric.functions, strict=True)):
            future: Future[Values] = Future()
            calls.append(future)
            if self._inline[index]:
                future.set_result(values_of(name, function, prompts, completions, columns))
            else:
                self._submit(_Call(index, prompts, completions, columns, future))
        if all(call.done() for call in calls):
            return self._combined(calls)
        scored: Future[list[Scored]] = Future()
        missing = itertools.count(len(calls) - 1, -1)  # next() is atomic

        def ended(_: Future[Values]) -> None:
            if next(missing) == 0:
                try:
                    scored.set_result(self._combined(calls))
                except BaseException as error:  # noqa: BLE001 - raised where the scores are awaited
                    scored.set_exception(error)

        for call in calls:
            call.add_done_callback(ended)
        return scored

    def close(self) -> None:
        """Ends the processes and the loop. Results of calls in progress are ignored."""
        with self._lock:
            self._closed = True
            self._arrived.notify_all()
            children = [*self._children]
        for child in children:
            child.kill()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _combined(self, calls: Sequence[Future[Values]]) -> list[Scored]:
        scored = self.rubric.combine([call.result() for call in calls])
        default = self.settings.reward_on_error
        if default is not None:
            for one in scored:
                one.reward = default if one.reward is None else one.reward
        return scored

    def _submit(self, call: _Call) -> None:
        function = self.rubric.functions[call.function]
        if getattr(function, "batched", False):
            with self._lock:
                gathered = self._gathered.get(call.function)
                if gathered is not None:
                    gathered.append(call)
                    return
                self._gathered[call.function] = []
        self._start(call)

    def _start(self, call: _Call) -> None:
        function = self.rubric.functions[call.function]
        if getattr(function, "batched", False):
            call.values.add_done_callback(lambda _: self._start_gathered(call.function))
        with self._lock:
            if not self._watching:
                self._watching = True
                threading.Thread(target=self._watch, name="reward-watch", daemon=True).start()
        if is_async(function):
            self._start_on_loop(call)
            return
        with self._lock:
            self._waiting.append(call)
        self._grow()

    def _grow(self) -> None:
        """Starts a thread if more calls wait than threads are idle."""
        with self._lock:
            if self._idle < len(self._waiting) and self._threads < self._max_threads():
                self._threads += 1
                threading.Thread(target=self._serve, name="reward", daemon=True).start()
            self._arrived.notify()

    def _max_threads(self) -> int:
        return (self.settings.reward_processes or PROCESSES) if self._in_processes else self.settings.reward_concurrency

    def _start_gathered(self, function: int) -> None:
        """Merges the calls that arrived while a batched function was in flight into its next call."""
        with self._lock:
            gathered = self._gathered[function]
            if not gathered:
                del self._gathered[function]
                return
            self._gathered[function] = []
        names = {name for call in gathered for name in call.columns}
        nothing = {id(call): [None] * len(call.completions) for call in gathered}
        whole = _Call(
            function,
            [prompt for call in gathered for prompt in call.prompts],
            [completion for call in gathered for completion in call.completions],
            {name: [v for call in gathered for v in call.columns.get(name, nothing[id(call)])] for name in names},
            Future(),
        )

        def split(answered: Future[Values]) -> None:
            error = answered.exception()
            values = iter(answered.result() if error is None else ())
            for call in gathered:
                if error is not None:
                    call.values.set_exception(error)
                else:
                    call.values.set_result([next(values) for _ in call.completions])

        whole.values.add_done_callback(split)
        self._start(whole)

    # -- threads, each with a process if needed ----------------------------------------------------------------------

    def _serve(self) -> None:
        """Consumes waiting calls; waits for one, unblocked by `_start`, `close`, or `IDLE_S`."""
        child: _Child | None = None
        try:
            while (call := self._next()) is not None:
                if not call.stoppable:
                    self._end(call, *self._call_here(call))
                else:
                    try:
                        child = child or self._new_child()
                    except OSError as error:
                        reason = f"a process for reward functions could not be started: {sentence_of(error)}"
                        self._end(call, [NoReward(reason)] * len(call.completions))
                        continue
                    values, error = child.call(call, self.rubric.names[call.function], self.settings.reward_timeout_s)
                    if not child.alive:
                        self._drop_child(child)
                        child = None
                    self._end(call, values, error)
                if call.abandoned:  # it returned after all; another thread replaced this one
                    with self._lock:
                        self._abandoned -= 1
                    return
        finally:
            if child is not None:
                self._drop_child(child)

    def _next(self) -> _Call | None:
        with self._lock:
            self._idle += 1
            arrived = self._arrived.wait_for(lambda: self._waiting or self._closed, IDLE_S)
            self._idle -= 1
            if not arrived or self._closed or self._threads > self._max_threads():
                self._threads -= 1
                self._arrived.notify()
                return None
            call = self._waiting.popleft()
            call.began = time.monotonic()
            call.stoppable = self._in_processes
            call.thread = 0 if self._in_processes else threading.get_ident()
            self._running.add(call)
            return call

    def _call_here(self, call: _Call) -> tuple[Values, BaseException | None]:
        name, function = self.rubric.names[call.function], self.rubric.functions[call.function]
        try:
            return values_of(name, function, call.prompts, call.completions, call.columns), None
        except BaseException as error:  # noqa: BLE001 - raised where the scores are awaited
            return [], error

    def _end(self, call: _Call, values: Values, error: BaseException | None = None) -> None:
        with self._lock:
            self._running.discard(call)
            self._on_loop.discard(call)
            if call.abandoned:
                return
        if error is not None:
            call.values.set_exception(error)
        else:
            call.values.set_result(values)

    def _new_child(self) -> _Child:
        assert self._elsewhere is not None
        child = _Child(*self._elsewhere)
        with self._lock:
            self._children.add(child)
            closed = self._closed
        if closed:
            child.kill()
        return child

    def _drop_child(self, child: _Child) -> None:
        child.kill()
        with self._lock:
            self._children.discard(child)

    # -- deadlines of threads, and progress --------------------------------------------------------------------------

    def _watch(self) -> None:
        """Reports the longest-running call, and abandons overdue calls in threads and a loop that is blocked."""
        while not self._closed:
            time.sleep(POLL_EVERY_S)
            now = time.monotonic()
            with self._lock:
                running = [*self._running]
            if not running:
                continue
            oldest = min(running, key=lambda call: call.began)
            if (ran_s := now - oldest.began) > REPORT_AFTER_S:
                name = self.rubric.names[oldest.function]
                calls = f"{len(running)} calls in flight" if len(running) > 1 else "one call in flight"
                self._progressed(f"{REWARD} {name} running for {ran_s:.0f} s, {calls}{_location(oldest)}")
            for call in running:
                late_s = now - call.began - self.settings.reward_timeout_s
                if late_s > 0 and not call.stoppable:
                    self._abandon(call)
                elif late_s > BLOCKED_S and call.task is not None:
                    self._abandon_loop(call)

    def _abandon(self, call: _Call) -> None:
        """Handles a missed deadline in a thread. The thread continues, and its result is ignored."""
        with self._lock:
            if call not in self._running:
                return
            call.abandoned = True
            self._running.discard(call)
            self._threads -= 1
            self._abandoned += 1
            moves = self.settings.reward_processes != 0 and self._elsewhere is not None
            moved, self._in_processes = moves and not self._in_processes, moves
        name, timeout_s = self.rubric.names[call.function], self.settings.reward_timeout_s
        if moved:
            log.warning("reward %s ran for over %g s in a thread; it runs in processes from now on", name, timeout_s)
        if self._abandoned >= self.settings.reward_concurrency and not moves:
            call.values.set_exception(
                RunFailed(
                    f"{self._abandoned} calls of reward functions hang in threads, the last of {name!r}, and threads "
                    "cannot be stopped: set env.reward_processes above 0"
                )
            )
        else:
            call.values.set_result(_missed(name, timeout_s, len(call.completions)))
        self._grow()

    # -- async functions ---------------------------------------------------------------------------------------------

    def _start_on_loop(self, call: _Call) -> None:
        with self._lock:
            if self._loop is None:
                self._slots = asyncio.Semaphore(self.settings.reward_concurrency)
                self._loop = start_loop("reward-loop")
            self._on_loop.add(call)
            asyncio.run_coroutine_threadsafe(self._await(call, self._slots), self._loop)

    def _abandon_loop(self, call: _Call) -> None:
        """Handles a coroutine that was not cancelled at its deadline, since it or another one blocks the loop. All that
        run end without a reward, and those that wait for a slot start on a new loop. The old loop ends if it continues.
        """
        with self._lock:
            if call not in self._running:
                return
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None
            calls, self._on_loop = self._on_loop, set()
            self._running -= calls
            for one in calls:
                one.abandoned = True
        timeout_s = self.settings.reward_timeout_s
        on_thread = msgspec.structs.replace(call, task=None)  # another call may be the one that blocks
        log.warning(
            "an async reward function blocked its event loop for over %g s%s; it must await, or be a plain function",
            BLOCKED_S,
            _location(on_thread),
        )
        for one in calls:
            if one.began:
                one.values.set_result(_missed(self.rubric.names[one.function], timeout_s, len(one.completions)))
            else:
                self._start_on_loop(msgspec.structs.replace(one, abandoned=False))

    async def _await(self, call: _Call, slots: asyncio.Semaphore) -> None:
        name, function = self.rubric.names[call.function], self.rubric.functions[call.function]
        async with slots:
            with self._lock:
                if call.abandoned:  # it started on another loop, since this one was blocked
                    return
                call.began = time.monotonic()
                call.stoppable = True
                call.task, call.thread = asyncio.current_task(), threading.get_ident()
                self._running.add(call)
            values: Values = []
            failure: BaseException | None = None
            deadline = asyncio.timeout(self.settings.reward_timeout_s)
            try:
                async with deadline:
                    values = await awaited_values_of(name, function, call.prompts, call.completions, call.columns)
            except TimeoutError:
                values = _missed(name, self.settings.reward_timeout_s, len(call.completions))
            except BaseException as error:  # noqa: BLE001 - raised where the scores are awaited
                failure = error
            self._end(call, values, failure)

    def __repr__(self) -> str:
        return (
            f"Scoring({self.rubric!r}, running={len(self._running)}, waiting={len(self._waiting)}, "
            f"threads={self._threads}, abandoned={self._abandoned}, processes={len(self._children)})"
        )


def _location(call: _Call) -> str:
    """The innermost lines of a call's stack, if it runs in this process."""
    if call.task is not None:
        return task_location(call.task)
    return thread_location(call.thread) if call.thread else ""


def _missed(name: str, timeout_s: float, completions: int) -> Values:
    return [NoReward(f"reward function {name!r} did not answer within {timeout_s:g} s")] * completions


class _Child:
    """One process with the rubric. It runs one call at a time, and is killed if a call misses its deadline."""

    def __init__(self, make: Callable[..., Rubric], arguments: tuple[Any, ...]) -> None:
        # Forking a process that has threads, as a worker does, can deadlock the child.
        context = multiprocessing.get_context("spawn")
        self._pipe, child_end = context.Pipe()
        self._process = context.Process(target=_child, args=(child_end, os.getpid(), make, arguments), name="reward")
        self._process.daemon = True
        self._process.start()
        child_end.close()
        self.alive = True
        self._ready = False
        self._killing = threading.Lock()

    def call(self, call: _Call, name: str, timeout_s: float) -> tuple[Values, BaseException | None]:
        """Blocks for the result. Afterwards the process may have ended: see `alive`."""
        try:
            if not self._ready:
                if not self._pipe.poll(START_S):
                    return self._no_reward(f"a process for reward functions did not start within {START_S:.0f} s", call)
                if (failure := self._pipe.recv()) is not None:
                    self.kill()
                    return [], RunFailed(f"a process for reward functions could not start: {failure}")
                self._ready = True
                call.began = time.monotonic()
            self._pipe.send((call.function, name, call.prompts, call.completions, dict(call.columns)))
            if not self._pipe.poll(timeout_s):
                self.kill()
                return _missed(name, timeout_s, len(call.completions)), None
            answer = self._pipe.recv()
        except (EOFError, OSError):
            self.kill()
            cause = exit_cause(self._process.exitcode or 0)
            return self._no_reward(f"the process of reward function {name!r} ended with {cause}", call)
        except Exception as error:  # noqa: BLE001 - mostly values that cannot be pickled
            self.kill()
            return [], RunFailed(f"reward function {name!r} cannot be called in another process: {error}")
        return ([], answer) if isinstance(answer, PenstockError) else (answer, None)

    def kill(self) -> None:
        """Idempotent. The lock keeps a second thread from closing a descriptor number that is in use again."""
        with self._killing:
            self.alive = False
            self._process.kill()
            self._process.join()
            self._pipe.close()

    def _no_reward(self, reason: str, call: _Call) -> tuple[Values, None]:
        return [NoReward(reason)] * len(call.completions), None


def _child(pipe: Connection, parent: int, make: Callable[..., Rubric], arguments: tuple[Any, ...]) -> None:
    """The process: answers calls until its parent closes the pipe or ends."""
    watch_parent(parent)
    try:
        rubric = make(*arguments)
    except BaseException:  # noqa: BLE001 - sent to the parent
        pipe.send(traceback.format_exc())
        return
    pipe.send(None)
    while True:
        try:
            function, name, prompts, completions, columns = pipe.recv()
        except EOFError:
            return
        try:
            answer: Any = values_of(name, rubric.functions[function], prompts, completions, columns)
        except PenstockError as error:
            answer = error
        pipe.send(answer)
