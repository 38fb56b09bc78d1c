"""The controller's service: a request goes in, a reply comes out. No HTTP here, see `http.py`.

The service owns the one machine that decides. It feeds it one event at a time on one loop, journals what changed,
carries out what the machine asks for, and holds calls that have to wait.

Order of things for one event: the machine decides, the journal takes what changed, waiting calls are woken, the commit
is awaited, and only then does the reply leave and are instructions carried out. So whatever a peer was told survives
the death of this process, and whatever did not survive was never told to anyone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from penstock.control import effects
from penstock.control.controller import Controller, Decided
from penstock.control.effects import Effect
from penstock.control.events import TimePassed
from penstock.control.io.metric_lines import MetricLines
from penstock.control.io.waiting import HeldCalls, deadline
from penstock.control.notes import noteworthy
from penstock.errors import PenstockError, RunFailed
from penstock.journal.reader import replay
from penstock.payload.discards import Discards
from penstock.records.ids import MemberId, PipelineName
from penstock.runtime.clock import Clock
from penstock.runtime.tasks import Tasks
from penstock.wire import messages
from penstock.wire.codec import encode_section
from penstock.wire.messages import Delivered, Leased, NotYet, Ok, Orders, Refused, Reply, Request

logger = logging.getLogger(__name__)

SNAPSHOT_REST = 500
"""Times the duration of a snapshot must pass before the next."""
JOURNAL_PATIENCE_S = 30.0
"""A disk that accepts nothing for this long has failed."""

HELD: dict[type, tuple[str, ...]] = {
    messages.AskLease: ("leases", "phase"),
    messages.AskBatch: ("batches", "phase"),
    messages.AskWeights: ("weights", "phase"),
    messages.AskCheckpoint: ("checkpoint", "phase"),
    messages.AskDevices: ("devices",),
    messages.AskOrders: ("orders",),
}
"""Requests that wait for a better reply, and what is announced when there may be one."""

_encode = msgspec.msgpack.Encoder(enc_hook=encode_section).encode


class EventLog(Protocol):
    """What the service needs of the journal's writer."""

    path: Path
    last_seq: int

    @property
    def uncommitted_for_s(self) -> float: ...
    def append(self, pipeline: PipelineName, at: float, event: bytes, decided: bytes = b"") -> int: ...
    async def committed(self, seq: int) -> None: ...
    async def flushed(self) -> None: ...
    def snapshot(self, states: Mapping[PipelineName, bytes]) -> None: ...
    def fail(self, failure: PenstockError) -> None: ...


class ControlService:
    def __init__(
        self,
        controller: Controller,
        journal: EventLog,
        clock: Clock,
        *,
        lines: MetricLines | None = None,
        lag: Callable[[], dict[str, float]] | None = None,
        snapshot_every: int = 20_000,
        tick_s: float = 0.25,
    ) -> None:
        """`lines` takes a line per step and evaluation; `lag` says how late the loop is."""
        self.controller = controller
        self.journal = journal
        self.metrics: dict[tuple[PipelineName, MemberId], dict[str, float]] = {}
        """The latest figures of every process that reports any."""
        self.failure: str = ""
        """The sentence with which the run failed, once it has."""
        self.failed = asyncio.Event()
        self.waiting = HeldCalls()
        self.prefetch: Mapping[PipelineName, bool] = {}
        """What workers are told with every lease; nothing of a pipeline: they do what they were started with."""
        self.evicted: dict[MemberId, str] = {}
        """Members that must be gone: the supervisor ends them."""
        self._clock = clock
        self._lines = lines
        self._lag = lag
        self._snapshot_every = snapshot_every
        self._tick_s = tick_s
        self._snapshot_seq = 0
        self._snapshot_not_before = 0.0
        self._latest = 0.0
        self._discards = Discards()
        self._instructions: asyncio.Queue[tuple[int, PipelineName, Effect]] = asyncio.Queue()

    # -- life -----------------------------------------------------------------------------------------------------

    def start(self, *, new_session: bool = False, lines_on_file: Iterable[bytes] = ()) -> int:
        """Replays the journal and takes up the work; returns how many events lie behind (0: a new run).

        In a new session of the run none of the former processes is left; after a mere restart all of them are. Lines of
        steps and evaluations that the journal has and `lines_on_file` lacks are written again: a killed controller
        takes those along that its writer had not got to.
        """
        replayed = self._recover()
        new_life = not replayed or new_session
        self._carry(self.controller.start(self._now(), resumed=bool(replayed) and new_session, new_life=new_life))
        if self._lines is not None:
            on_file = lines_on_file if replayed else ()
            self._lines.complete(self.controller.pipelines, on_file)
        return replayed

    def _recover(self) -> int:
        """Brings the machine to the last committed state. Instructions of the past are not carried out again."""
        story, controller = replay(self.journal.path), self.controller
        unknown = [name for name in story.states if not controller.knows(name)]
        for name, state in story.states.items():
            if controller.knows(name):
                try:
                    controller.restore(name, state)
                except Exception as error:
                    raise self._unreadable(f"the snapshot of {name} after event {story.seq}", error) from error
        count = 0
        for entry in story.entries:
            self._latest = max(self._latest, entry.at)
            if not controller.knows(entry.pipeline):
                unknown.append(entry.pipeline)
                continue
            try:
                controller.replay(entry.pipeline, entry.body, entry.at)
            except Exception as error:
                raise self._unreadable(f"event {entry.seq} of {entry.pipeline}", error) from error
            count += 1
        if unknown:
            raise RunFailed(
                f"journal {self.journal.path} knows the pipelines {sorted(set(unknown))}, which this run does not "
                "have: resume with the configuration in the run directory"
            )
        self._snapshot_seq = story.seq
        return story.seq + count

    def _unreadable(self, what: str, error: Exception) -> RunFailed:
        return RunFailed(
            f"journal {self.journal.path}: {what} cannot be replayed ({type(error).__name__}: {error}); it was written "
            "by another version of Penstock, or with another configuration"
        )

    async def run(self) -> None:
        """Ticks and carries out instructions until cancelled."""
        async with Tasks() as tasks:
            tasks.spawn("tick", self._keep_ticking())
            tasks.spawn("instructions", self._carry_out())

    def close(self) -> None:
        """Lets go of every held call; they are answered as they stand."""
        self.waiting.close()

    async def settle(self) -> None:
        """Returns once everything that happened so far is committed."""
        await self.journal.committed(self.journal.last_seq)

    def check(self) -> None:
        self.controller.check()

    # -- calls ----------------------------------------------------------------------------------------------------

    async def call(self, request: Request) -> Reply:
        """Answers one call. Never raises for what a caller can get wrong: it is `Refused`, and nothing changed."""
        known = self.controller.pipelines
        if request.pipeline not in known:
            names = ", ".join(known)
            return Refused("LocalProtocolError", f"there is no pipeline {request.pipeline!r}; there are: {names}")
        try:
            return await self._answer(request)
        except RunFailed as error:
            self._fail(error.message)
            return Refused("RunFailed", error.message)

    async def _answer(self, request: Request) -> Reply:
        """Whatever a reply promises is committed before it is returned; a heartbeat's promises nothing."""
        name = request.pipeline
        if isinstance(request, messages.ReportMetrics):
            self.metrics[name, request.member] = request.values
            return Ok()
        if isinstance(request, messages.FlushJournal):
            await self.journal.flushed()
            return Ok()
        kind, topics = str(request.__struct_config__.tag), HELD.get(type(request))
        if topics is None:
            reply = self._decide(request)
        else:
            reply = await self._hold(request, kind, topics)
        if not isinstance(request, messages.Heartbeat):
            await self.settle()
        if isinstance(reply, Leased) and isinstance(request, messages.AskLease):
            return self._complete(request, reply)
        if self._lines is not None:
            if isinstance(request, messages.AckStep) and reply == Ok():
                self._lines.write_step(request, self.controller.pipelines[name])
            elif isinstance(request, messages.Deliver) and request.rollouts:
                self._lines.note_delivery(request, reply.refused if isinstance(reply, Delivered) else ())
        if isinstance(request, messages.Unregister):
            self.metrics.pop((name, request.member), None)
        return reply

    async def _hold(self, request: Any, kind: str, topics: tuple[str, ...]) -> Reply:
        """Decides again whenever there may be a better reply, until the time is up."""
        name, waiting = request.pipeline, self.waiting
        reply = self._decide(request)
        if not _may_improve(reply):
            return reply
        until = deadline(request.wait_s)
        with waiting.holding(name, kind):
            while _may_improve(reply) and await waiting.hold(name, topics, request.member, until):
                reply = self._decide(request)
        return reply

    def _decide(self, request: Request) -> Any:
        if isinstance(request, messages.AskLease):
            request = msgspec.structs.replace(request, steady=True)
        return self._carry(self.controller.handle(request, self._now()))

    def _complete(self, request: messages.AskLease, reply: Leased) -> Leased:
        """Adds what goes with every reply to an ask: payloads to be freed, and the live setting of prefetch."""
        machine = self.controller.pipelines[request.pipeline]
        member = machine.members.get(request.member)
        discard = self._discards.answer(member.rings if member is not None else (), request.request)
        prefetch = self.prefetch.get(request.pipeline)
        return msgspec.structs.replace(reply, discard=discard, oldest=machine.oldest_trainable, prefetch=prefetch)

    # -- effects --------------------------------------------------------------------------------------------------

    def _carry(self, decided: Decided) -> Any:
        """Journals and wakes at once, leaves the rest for after the commit; returns the reply, if it was a request."""
        now, journal = self._latest, self.journal
        for name, effect in decided:
            kind = type(effect)
            if kind is effects.Record:
                journal.append(name, now, _encode(effect.event), noteworthy(effect.decided))  # type: ignore[union-attr]
            elif kind is effects.Announce:
                self.waiting.wake(name, effect.topic, effect.member)  # type: ignore[union-attr]
            elif kind in _LATER:
                self._instructions.put_nowait((journal.last_seq, name, effect))
        return decided[0][1] if decided else None

    def tick(self) -> None:
        """To be called a few times a second: silence, deadlines, demand."""
        self._carry(self.controller.handle(TimePassed(), self._now()))
        if self.journal.uncommitted_for_s > JOURNAL_PATIENCE_S:
            failure = RunFailed(
                f"journal {self.journal.path}: nothing could be written for {JOURNAL_PATIENCE_S:.0f} s; the disk hangs"
            )
            self.journal.fail(failure)
            self._fail(failure.message)
        self._maybe_snapshot()

    async def _keep_ticking(self) -> None:
        while True:
            self.tick()
            await asyncio.sleep(self._tick_s)

    def _maybe_snapshot(self) -> None:
        """Taking one stops the loop for about half a microsecond per sample in flight: never for more than 0.2 %."""
        now = self._clock.now()
        if self.journal.last_seq - self._snapshot_seq < self._snapshot_every or now < self._snapshot_not_before:
            return
        self._snapshot_seq = self.journal.last_seq
        self.journal.snapshot(self.controller.snapshot())
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
            self._obey(name, effect)

    def _obey(self, name: PipelineName, effect: Effect) -> None:
        match effect:
            case effects.Log(level=level, line=line):
                logger.log(_LEVELS[level], "%s", line)
            case effects.FailRun(sentence=sentence):
                self._fail(sentence)
            case effects.EvictMember(member=member, reason=reason):
                self.metrics.pop((name, member), None)
                self.evicted[member] = reason
            case effects.ReleasePayloads(payloads=payloads):
                self._discards.add(payloads)
            case effects.NoteEvaluation(result=result) if self._lines is not None:
                self._lines.write_evaluation(name, result)

    # -- what one may ask -----------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """For the live view and `/v1/status`: plain values only."""
        now, controller = self._now(), self.controller
        status: dict[str, Any] = {
            "at": now,
            "failure": self.failure,
            "held": self.waiting.statistics(),
            "journal_seq": self.journal.last_seq,
            "pipelines": controller.status(now),
            "members": {f"{name}/{member}": values for (name, member), values in self.metrics.items()},
            "evicted": self.evicted | controller.fenced,
            "lag": self._lag() if self._lag is not None else {},
            "stages": self._lines.stages if self._lines is not None else {},
            "slow": {name: slow for name, machine in controller.pipelines.items() if (slow := machine.slow_reward())},
        }
        if controller.pool is not None:
            status["pool"] = msgspec.to_builtins(controller.pool.status(now))
        return status

    def diagnosis(self) -> dict[PipelineName, str]:
        """Per pipeline: who waits for what, since when, and who should have moved."""
        return self.controller.diagnose(self._now())

    def _now(self) -> float:
        """Never behind what is on record, even if the machine's clock was set back between two controllers."""
        self._latest = max(self._latest, self._clock.now())
        return self._latest

    def _fail(self, sentence: str) -> None:
        if not self.failure:
            self.failure = sentence
            logger.error("the run fails: %s", sentence)
            self.failed.set()

    def __repr__(self) -> str:
        held = self.waiting.statistics()
        return f"ControlService({self.controller}, held={held}, {self.journal}, failure={self.failure!r})"


def _may_improve(reply: Reply) -> bool:
    """Whether waiting may bring more: a final answer, and one about weights that are too old, is given at once."""
    if isinstance(reply, NotYet):
        return reply.phase != "stopped"
    return (isinstance(reply, Leased) and reply.verdict == "throttled") or reply == Orders(())


_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_LATER = frozenset({effects.EvictMember, effects.ReleasePayloads, effects.NoteEvaluation, effects.Log, effects.FailRun})
"""Instructions that are carried out once the event behind them is committed."""
