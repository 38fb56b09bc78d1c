"""The controller's service: a request goes in, a reply comes out. No HTTP here, see `http.py`.

The service owns the machines of all pipelines. It feeds them one event at a time on one loop, journals those that
changed something, carries out what the machines ask for, and holds calls that have to wait.

Order of things for one event: the machine decides, the journal takes the event, waiting calls are woken, the commit is
awaited, and only then does the reply leave and are instructions carried out. So whatever a peer was told survives the
death of this process, and whatever did not survive was never told to anyone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, get_args

import msgspec

from penstock.control import effects, events
from penstock.control.effects import Effect
from penstock.control.events import Event
from penstock.control.io.waiting import HeldCalls, deadline
from penstock.control.notes import noteworthy
from penstock.errors import PenstockError, RunFailed
from penstock.journal.reader import replay
from penstock.records.ids import MemberId, PipelineName, Version
from penstock.runtime.clock import Clock
from penstock.runtime.tasks import Tasks
from penstock.wire.messages import (
    AskBatch,
    AskLease,
    Heartbeat,
    Leased,
    NotYet,
    Ok,
    Refused,
    Reply,
    ReportMetrics,
    ReportReplica,
    Request,
    Stop,
    Unregister,
)

logger = logging.getLogger(__name__)

SNAPSHOT_REST = 500
"""Times the duration of a snapshot must pass before the next."""
EVENT_CHARACTERS = 200
"""Of an event, told in an error."""
JOURNAL_PATIENCE_S = 30.0
"""A disk that accepts nothing for so long has failed."""

Answerer = Callable[[Any], Awaitable[Reply]]
Steadiness = Callable[[PipelineName, MemberId, Version], bool]

_HELD: dict[type, tuple[str, ...]] = {AskLease: ("leases", "phase"), AskBatch: ("batches", "phase")}
"""Requests that wait for a better reply, and what is announced when there may be one."""

_EVENTS = frozenset(get_args(Event))

_decode_event: Callable[[bytes], Event] = msgspec.msgpack.Decoder(Event).decode
_encode = msgspec.msgpack.Encoder().encode


class Machine(Protocol):
    """What the service needs of a pipeline's control."""

    @property
    def revision(self) -> int: ...
    def handle(self, event: Event, now: float) -> list[Effect]: ...
    def snapshot(self) -> bytes: ...
    def restore(self, snapshot: bytes) -> None: ...
    def status(self, now: float) -> Mapping[str, Any]: ...
    def diagnose(self, now: float) -> str: ...
    def check(self) -> None: ...


class Neighbour(Protocol):
    """Another event-sourced machine of this process that shares the journal, under a name of its own."""

    def replay(self, body: bytes, at: float) -> None: ...
    def snapshot(self) -> bytes: ...
    def restore(self, snapshot: bytes) -> None: ...
    def check(self) -> None: ...


class EventLog(Protocol):
    """What the service needs of the journal's writer."""

    path: Path
    last_seq: int

    @property
    def uncommitted_for_s(self) -> float: ...
    def append(self, pipeline: PipelineName, at: float, event: bytes, decided: bytes = b"") -> int: ...
    async def committed(self, seq: int) -> None: ...
    def snapshot(self, states: Mapping[PipelineName, bytes]) -> None: ...
    def fail(self, failure: PenstockError) -> None: ...


class ControlService:
    def __init__(
        self,
        pipelines: Mapping[PipelineName, Machine],
        journal: EventLog,
        clock: Clock,
        *,
        on_instruction: Callable[[PipelineName, Effect], None] | None = None,
        answerers: Mapping[type, Answerer] | None = None,
        neighbours: Mapping[PipelineName, Neighbour] | None = None,
        is_steady: Steadiness = lambda pipeline, member, version: True,
        snapshot_every: int = 20_000,
        tick_s: float = 0.5,
    ) -> None:
        """`on_instruction` is given every instruction the service does not carry out itself, after the commit.

        `answerers` answer further kinds of calls; `neighbours` are replayed from, and kept in, the same journal.
        `is_steady` says whether a worker's weights will stay what they are.
        """
        self.pipelines = dict(pipelines)
        self.neighbours = dict(neighbours or {})
        self.journal = journal
        self.metrics: dict[tuple[PipelineName, MemberId], dict[str, float]] = {}
        """The latest figures of every process that reports any."""
        self.failure: str = ""
        """The sentence with which the run failed, once it has."""
        self.waiting = HeldCalls()
        self.failed = asyncio.Event()
        self._clock = clock
        self._on_instruction = on_instruction
        self._snapshot_every = snapshot_every
        self._tick_s = tick_s
        self._snapshot_seq = 0
        self._snapshot_not_before = 0.0
        self._latest = 0.0
        self._instructions: asyncio.Queue[tuple[int, PipelineName, Effect]] = asyncio.Queue()
        self._answerers = dict(answerers or {})
        self._is_steady = is_steady

    # -- life -----------------------------------------------------------------------------------------------------

    def recover(self) -> int:
        """Brings the machines to the last committed state; returns how many events lie behind it (0: a new run).

        Instructions of the past are not carried out again.
        """
        story = replay(self.journal.path)
        known = self.pipelines | self.neighbours
        unknown = [name for name in story.states if name not in known]
        for name, state in story.states.items():
            if name in known:
                try:
                    known[name].restore(state)
                except Exception as error:
                    raise self._unreadable(f"the snapshot of {name} after event {story.seq}", error) from error
        count = 0
        for entry in story.entries:
            self._latest = max(self._latest, entry.at)
            if entry.pipeline not in known:
                unknown.append(entry.pipeline)
                continue
            try:
                if entry.pipeline in self.neighbours:
                    self.neighbours[entry.pipeline].replay(entry.body, entry.at)
                else:
                    self.pipelines[entry.pipeline].handle(_decode_event(entry.body), entry.at)
            except Exception as error:
                raise self._unreadable(f"event {entry.seq} of {entry.pipeline}", error) from error
            count += 1
        if unknown:
            raise RunFailed(
                f"journal {self.journal.path} knows the pipelines {sorted(set(unknown))}, which this run does not "
                "have: resume with the configuration in the run directory"
            )
        self._snapshot_seq = story.seq
        for name in self.pipelines:  # before any call: the machines must see that it was us who were away
            self.happen(name, events.TimePassed())
        return story.seq + count

    def _unreadable(self, what: str, error: Exception) -> RunFailed:
        return RunFailed(
            f"journal {self.journal.path}: {what} cannot be replayed ({type(error).__name__}: {error}); it was written "
            "by another version of Penstock, or with another configuration"
        )

    async def run(self) -> None:
        """Ticks and carries out instructions until cancelled."""
        async with Tasks() as tasks:
            tasks.spawn("tick", self._tick())
            tasks.spawn("instructions", self._carry_out())

    def close(self) -> None:
        """Lets go of every held call; they are answered as they stand."""
        self.waiting.close()

    async def settle(self) -> None:
        """Returns once everything that happened so far is committed."""
        await self.journal.committed(self.journal.last_seq)

    def check(self) -> None:
        for machine in (*self.pipelines.values(), *self.neighbours.values()):
            machine.check()

    # -- events ---------------------------------------------------------------------------------------------------

    def happen(self, name: PipelineName, event: Event) -> list[Effect]:
        """Feeds one event to a machine, journals it if it changed anything, and wakes those who waited for it."""
        machine = self.pipelines[name]
        now = self._now()
        before = machine.revision
        try:
            decided = machine.handle(event, now)
        except RunFailed as error:  # of the user's own code
            raise RunFailed(f"{name}: {error.message}") from error
        except Exception as error:
            # Part of the event may have been booked: going on would be going on from a state nobody knows.
            what = f"{event!r}"[:EVENT_CHARACTERS]
            raise RunFailed(f"pipeline {name} broke on {what}: {type(error).__name__}: {error}") from error
        if machine.revision != before:
            self.journal.append(name, now, _encode(event), noteworthy(decided))
        for effect in decided:
            kind = type(effect)
            if kind is effects.Announce:
                self.waiting.wake(name, effect.topic)  # type: ignore[union-attr]
            elif kind in _INSTRUCTIONS:
                self._instructions.put_nowait((self.journal.last_seq, name, effect))
        return decided

    async def call(self, request: Request) -> Reply:
        """Answers one call. Never raises for what a caller can get wrong: it is `Refused`, and nothing changed."""
        if request.pipeline not in self.pipelines:
            known = ", ".join(self.pipelines)
            return Refused("LocalProtocolError", f"there is no pipeline {request.pipeline!r}; there are: {known}")
        try:
            answerer = self._answerers.get(type(request))
            return await (answerer(request) if answerer is not None else self._answer(request))
        except RunFailed as error:
            self._fail(error.message)
            return Refused("RunFailed", error.message)

    async def _answer(self, request: Any) -> Reply:
        """Whatever a reply promises is committed before it is returned; a heartbeat's promises nothing."""
        name = request.pipeline
        match request:
            case ReportReplica():
                return Ok()  # no event of the pipeline's
            case ReportMetrics():
                self.metrics[name, request.member] = request.values
                return Ok()
            case Stop():  # of the whole run
                replies = [self.happen(pipeline, request)[0] for pipeline in self.pipelines]
                await self.settle()
                return replies[0]  # type: ignore[return-value]
        if type(request) not in _EVENTS:
            return Refused("LocalProtocolError", f"{type(request).__name__} is not answered by this controller")
        kind, topics = str(request.__struct_config__.tag), _HELD.get(type(request))
        reply = self._decide(request, others_held=self.waiting.held(name, kind))
        if topics is not None and _may_improve(reply):
            until = deadline(request.wait_s)
            with self.waiting.holding(name, kind):
                while _may_improve(reply) and await self.waiting.hold(name, topics, until):
                    reply = self._decide(request, others_held=self.waiting.held(name, kind) - 1)
        if isinstance(request, Unregister):
            self.metrics.pop((name, request.member), None)
        if not isinstance(request, Heartbeat):
            await self.settle()
        return reply

    def _decide(self, request: Any, others_held: int) -> Any:
        name = request.pipeline
        if isinstance(request, AskLease):
            steady = self._is_steady(name, request.member, request.version)
            request = msgspec.structs.replace(request, waiting=others_held, steady=steady)
        return self.happen(name, request)[0]

    def status(self) -> dict[str, Any]:
        """For the live view and `/v1/status`: plain values only."""
        now = self._now()
        return {
            "at": now,
            "failure": self.failure,
            "held": self.waiting.statistics(),
            "journal_seq": self.journal.last_seq,
            "pipelines": {name: dict(machine.status(now)) for name, machine in self.pipelines.items()},
            "members": {f"{name}/{member}": values for (name, member), values in self.metrics.items()},
        }

    def diagnosis(self) -> dict[str, str]:
        """Per pipeline: who waits for what, since when, and who should have moved."""
        now = self._now()
        return {name: machine.diagnose(now) for name, machine in self.pipelines.items()}

    def _now(self) -> float:
        """Never behind what is on record, even if the machine's clock was set back between two controllers."""
        self._latest = max(self._latest, self._clock.now())
        return self._latest

    def _fail(self, sentence: str) -> None:
        if not self.failure:
            self.failure = sentence
            logger.error("the run fails: %s", sentence)
            self.failed.set()

    async def _tick(self) -> None:
        while True:
            for name in self.pipelines:
                self.happen(name, events.TimePassed())
            if self.journal.uncommitted_for_s > JOURNAL_PATIENCE_S:
                failure = RunFailed(
                    f"journal {self.journal.path}: nothing could be written for {JOURNAL_PATIENCE_S:.0f} s; "
                    "the disk hangs"
                )
                self.journal.fail(failure)
                self._fail(failure.message)
            self._maybe_snapshot()
            await asyncio.sleep(self._tick_s)

    def _maybe_snapshot(self) -> None:
        """Taking one stops the loop for about half a microsecond per sample in flight: never for more than 0.2 %."""
        now = self._clock.now()
        if self.journal.last_seq - self._snapshot_seq < self._snapshot_every or now < self._snapshot_not_before:
            return
        self._snapshot_seq = self.journal.last_seq
        self.journal.snapshot(
            {name: machine.snapshot() for name, machine in (self.pipelines | self.neighbours).items()}
        )
        self._snapshot_not_before = now + SNAPSHOT_REST * (self._clock.now() - now)

    async def _carry_out(self) -> None:
        """Consumes instructions in order; each waits until the event behind it is committed."""
        while True:
            seq, name, effect = await self._instructions.get()
            try:
                await self.journal.committed(seq)
            except RunFailed as error:
                self._fail(error.message)
                return
            if isinstance(effect, effects.Log):
                logger.log(_LEVELS[effect.level], "%s", effect.line)
            elif isinstance(effect, effects.FailRun):
                self._fail(effect.sentence)
            elif isinstance(effect, effects.EvictMember):
                self.metrics.pop((name, effect.member), None)
            if self._on_instruction is not None:
                self._on_instruction(name, effect)

    def __repr__(self) -> str:
        held = self.waiting.statistics()
        return f"ControlService({list(self.pipelines.values())}, held={held}, {self.journal}, failure={self.failure!r})"


def _may_improve(reply: Reply) -> bool:
    return isinstance(reply, NotYet) or (isinstance(reply, Leased) and reply.verdict == "throttled")


_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_INSTRUCTIONS = frozenset(
    {
        effects.OfferWeights,
        effects.EvictMember,
        effects.ReleasePayloads,
        effects.NoteEvaluation,
        effects.Log,
        effects.FailRun,
    }
)
