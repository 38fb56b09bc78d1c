"""Virtual time: processes as generators on one heap of timed events.

A process yields what it waits for (`Sleep`, `Until`, `Call`) and is resumed with the result. Nothing ever waits for
real, and with equal seeds everything happens in the same order, so a failure is its seed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from typing import Any

import msgspec

from penstock.errors import RunFailed
from penstock.records.ids import PipelineName


class Sleep(msgspec.Struct, frozen=True):
    """Resume after this many virtual seconds."""

    seconds: float


class Signal:
    """Something processes wait for; `fire` resumes all of them."""

    def __init__(self) -> None:
        self.waiting: list[Process] = []


class Until(msgspec.Struct, frozen=True):
    """Resume when the signal fires."""

    signal: Signal


class Call(msgspec.Struct, frozen=True):
    """Resume with the controller's answer, however many attempts that takes."""

    request: Any
    wait_s: float = 0.0


Step = Sleep | Until | Call
Body = Generator[Step, Any, Any]


class Process:
    """One strand of one simulated operating-system process; dies with its owner."""

    __slots__ = ("alive", "body", "owner")

    def __init__(self, owner: Owner, body: Body) -> None:
        self.owner = owner
        self.body = body
        self.alive = True


class Owner:
    """One incarnation of a simulated operating-system process."""

    def __init__(self, name: str, pipeline: PipelineName = PipelineName("sim")) -> None:
        self.name = name
        self.pipeline = pipeline
        self.alive = True
        self.wedged = False
        self.progressed_at = 0.0


class Engine:
    """The heap. `place_call` is how a yielded `Call` reaches whoever answers it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.handled = 0
        self.place_call: Callable[[Process, Call], None] | None = None
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0

    def after(self, seconds: float, act: Callable[..., None], *args: Any) -> None:
        """Does `act(*args)` after so many virtual seconds."""
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + seconds, self._sequence, act, args))

    def spawn(self, owner: Owner, body: Body) -> Process:
        process = Process(owner, body)
        self.after(0.0, self.resume, process, None)
        return process

    def fire(self, signal: Signal) -> None:
        waiting, signal.waiting = signal.waiting, []
        for process in waiting:
            self.after(0.0, self.resume, process, None)

    def resume(self, process: Process, value: Any) -> None:
        """Lets a process run up to its next wait; does nothing for the dead and the wedged."""
        owner = process.owner
        if not process.alive or not owner.alive or owner.wedged:
            return
        owner.progressed_at = self.now
        try:
            step = process.body.send(value)
        except StopIteration:
            process.alive = False
            return
        if isinstance(step, Sleep):
            self.after(step.seconds, self.resume, process, None)
        elif isinstance(step, Until):
            step.signal.waiting.append(process)
        elif self.place_call is not None:
            self.place_call(process, step)

    def run(self, done: Callable[[], bool], max_virtual_s: float, describe: Callable[[], str]) -> None:
        """Runs until `done`; raises RunFailed with `describe()` if virtual time runs out first."""
        while self._heap and not done():
            at, _, act, args = heapq.heappop(self._heap)
            self.now = at
            self.handled += 1
            if at > max_virtual_s:
                raise RunFailed(f"not finished after {max_virtual_s:.0f} virtual seconds: {describe()}")
            act(*args)
