"""The control service: takes a request, returns a reply. For HTTP see `http.py`.

The service owns the `Controller`. It passes one event at a time to it on one event loop, journals changes, executes
effects, and holds calls that must wait.

Order for one event: the controller decides, changes are appended to the journal, waiting calls are woken, the service
waits for the commit, and only then sends the reply and executes instructions. So every event that a peer has a reply
to survives the death of this process.
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
from penstock.control.notes import encode_notes
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

SNAPSHOT_PAUSE_FACTOR = 500
"""Minimum time between snapshots, in multiples of the duration of the last one."""
JOURNAL_TIMEOUT_S = 30.0
"""If no write completes for this long, the disk has failed."""

HELD: dict[type, tuple[str, ...]] = {
    messages.AskLease: ("leases", "phase"),
    messages.AskBatch: ("batches", "phase"),
    messages.AskWeights: ("weights", "phase"),
    messages.AskCheckpoint: ("checkpoint", "phase"),
    messages.AskDevices: ("devices",),
    messages.AskOrders: ("orders",),
}
"""Requests that wait for a better reply, and the topics that are announced when there may be one."""

_encode = msgspec.msgpack.Encoder(enc_hook=encode_section).encode


class EventLog(Protocol):
    """Interface of the journal writer."""

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
        """`lines` writes a line per step and evaluation; `lag` returns the lag of the event loop."""
        self.controller = controller
        self.journal = journal
        self.metrics: dict[tuple[PipelineName, MemberId], dict[str, float]] = {}
        """The latest metrics of every process that reports any."""
        self.failure: str = ""
        """The reason why the run failed; empty if it has not."""
        self.failed = asyncio.Event()
        self.waiting = HeldCalls()
        self.prefetch: Mapping[PipelineName, bool] = {}
        """Live setting, sent to workers with every lease. Without an entry, workers use their own configuration."""
        self.evicted: dict[MemberId, str] = {}
        """Evicted members: the supervisor ends their processes."""
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

    # -- start and stop -------------------------------------------------------------------------------------------

    def start(self, *, new_session: bool = False, lines_on_file: Iterable[bytes] = ()) -> int:
        """Replays the journal and starts; returns the number of past events (0: a new run).

        In a new session of the run no former process is left; after a restart of the controller alone they still run.
        Lines of steps and evaluations that are in the journal but not in `lines_on_file` are written again: a killed
        controller loses lines that were not written yet.
        """
        replayed = self._recover()
        new_session = not replayed or new_session
        if new_session:
            self.evicted.clear()
        else:
            self._recall_failure()
        self._apply(self.controller.start(self._now(), resumed=bool(replayed) and new_session, new_session=new_session))
        if self._lines is not None:
            on_file = lines_on_file if replayed else ()
            self._lines.complete(self.controller.pipelines, on_file)
        return replayed

    def _recover(self) -> int:
        """Restores the last committed state. Past instructions are not executed again, but evicted members are listed:
        the supervisor may not have read of them."""
        recovered, controller = replay(self.journal.path), self.controller
        unknown = [name for name in recovered.states if not controller.has_part(name)]
        for name, state in recovered.states.items():
            if controller.has_part(name):
                try:
                    controller.restore(name, state)
                except Exception as error:
                    raise self._unreadable(f"the snapshot of {name} after event {recovered.seq}", error) from error
        count = 0
        for entry in recovered.entries:
            self._latest = max(self._latest, entry.at)
            if not controller.has_part(entry.pipeline):
                unknown.append(entry.pipeline)
                continue
            try:
                decided = controller.replay(entry.pipeline, entry.body, entry.at)
            except Exception as error:
                raise self._unreadable(f"event {entry.seq} of {entry.pipeline}", error) from error
            count += 1
            self.evicted |= {one.member: one.reason for one in decided if isinstance(one, effects.EvictMember)}
        if unknown:
            raise RunFailed(
                f"journal {self.journal.path} has the pipelines {sorted(set(unknown))}, which this configuration "
                "lacks: resume with the configuration in the run directory"
            )
        self._snapshot_seq = recovered.seq
        return recovered.seq + count

    def _recall_failure(self) -> None:
        """Fails again if the run had failed: the supervisor may not have read of it."""
        for machine in self.controller.pipelines.values():
            if machine.state.failure:
                self._fail(machine.state.failure)

    def _unreadable(self, what: str, error: Exception) -> RunFailed:
        return RunFailed(
            f"journal {self.journal.path}: {what} cannot be replayed ({type(error).__name__}: {error}); it was written "
            "by another version of Penstock, or with another configuration"
        )

    async def run(self) -> None:
        """Runs the ticks and executes instructions until cancelled."""
        async with Tasks() as tasks:
            tasks.spawn("tick", self._tick_forever())
            tasks.spawn("instructions", self._execute_instructions())

    def close(self) -> None:
        """Ends all held calls; each gets its current reply."""
        self.waiting.close()

    async def settle(self) -> None:
        """Waits until all events so far are committed."""
        await self.journal.committed(self.journal.last_seq)

    def check(self) -> None:
        self.controller.check()

    # -- calls ----------------------------------------------------------------------------------------------------

    async def call(self, request: Request) -> Reply:
        """Answers one call. An invalid call does not raise: it returns `Refused` and changes nothing."""
        known = self.controller.pipelines
        if request.pipeline not in known:
            names = ", ".join(known)
            return Refused("LocalProtocolError", f"there is no pipeline {request.pipeline!r}; expected one of: {names}")
        try:
            return await self._answer(request)
        except RunFailed as error:
            self._fail(error.message)
            return Refused("RunFailed", error.message)

    async def _answer(self, request: Request) -> Reply:
        """Returns a reply after its event is committed; the reply to a heartbeat does not wait for the commit."""
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
                refused = reply.refused if isinstance(reply, Delivered) else ()
                self._lines.note_delivery(request, refused, self.controller.pipelines[name].ledger.oldest_allowed)
        if isinstance(request, messages.Unregister):
            self.metrics.pop((name, request.member), None)
        return reply

    async def _hold(self, request: Any, kind: str, topics: tuple[str, ...]) -> Reply:
        """Decides again whenever there may be a better reply, until the deadline."""
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
        return self._apply(self.controller.handle(request, self._now()))

    def _complete(self, request: messages.AskLease, reply: Leased) -> Leased:
        """Adds payloads to be freed, the oldest trainable version, and the setting of prefetch to a lease reply."""
        machine = self.controller.pipelines[request.pipeline]
        member = machine.members.get(request.member)
        discard = self._discards.answer(member.rings if member is not None else (), request.request)
        prefetch = self.prefetch.get(request.pipeline)
        return msgspec.structs.replace(reply, discard=discard, oldest=machine.oldest_trainable, prefetch=prefetch)

    # -- effects --------------------------------------------------------------------------------------------------

    def _apply(self, decided: Decided) -> Any:
        """Journals and wakes calls at once, queues instructions until the commit; returns the reply to a request."""
        now, journal = self._latest, self.journal
        for name, effect in decided:
            kind = type(effect)
            if kind is effects.Record:
                journal.append(name, now, _encode(effect.event), encode_notes(effect.decided))  # type: ignore[union-attr]
            elif kind is effects.Announce:
                self.waiting.wake(name, effect.topic, effect.member)  # type: ignore[union-attr]
            elif kind in _AFTER_COMMIT:
                self._instructions.put_nowait((journal.last_seq, name, effect))
        return decided[0][1] if decided else None

    def tick(self) -> None:
        """Must be called a few times per second: checks liveness, deadlines and demand."""
        self._apply(self.controller.handle(TimePassed(), self._now()))
        if self.journal.uncommitted_for_s > JOURNAL_TIMEOUT_S:
            failure = RunFailed(
                f"journal {self.journal.path}: no write completed for {JOURNAL_TIMEOUT_S:.0f} s; the disk hangs"
            )
            self.journal.fail(failure)
            self._fail(failure.message)
        self._maybe_snapshot()

    async def _tick_forever(self) -> None:
        while True:
            self.tick()
            await asyncio.sleep(self._tick_s)

    def _maybe_snapshot(self) -> None:
        """A snapshot blocks the event loop, about 0.5 µs per sample in flight: at most 0.2 % of the time."""
        now = self._clock.now()
        if self.journal.last_seq - self._snapshot_seq < self._snapshot_every or now < self._snapshot_not_before:
            return
        self._snapshot_seq = self.journal.last_seq
        self.journal.snapshot(self.controller.snapshot())
        self._snapshot_not_before = now + SNAPSHOT_PAUSE_FACTOR * (self._clock.now() - now)

    async def _execute_instructions(self) -> None:
        """Executes instructions in order, each after its event is committed."""
        while True:
            seq, name, effect = await self._instructions.get()
            try:
                await self.journal.committed(seq)
            except RunFailed as error:
                self._fail(error.message)
                return
            self._execute(name, effect)

    def _execute(self, name: PipelineName, effect: Effect) -> None:
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

    # -- queries --------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Status for the live view and `/v1/status`, in plain values."""
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
            "slow": {name: slow for name, machine in controller.pipelines.items() if (slow := machine.slow(now))},
            "biased": self._lines.biased() if self._lines is not None else {},
        }
        if controller.pool is not None:
            status["pool"] = msgspec.to_builtins(controller.pool.status(now))
        return status

    def diagnosis(self) -> dict[PipelineName, str]:
        """Per pipeline: which process waits for what, since when, and which one should act."""
        return self.controller.diagnose(self._now())

    def _now(self) -> float:
        """The time, never before the last journalled event, even if the clock was set back before a restart."""
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
    """Whether a later reply may be better. Final replies, and `version_too_old`, are sent at once."""
    if isinstance(reply, NotYet):
        return reply.phase != "stopped"
    return (isinstance(reply, Leased) and reply.verdict == "throttled") or reply == Orders(())


_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_AFTER_COMMIT = frozenset(
    {effects.EvictMember, effects.ReleasePayloads, effects.NoteEvaluation, effects.Log, effects.FailRun}
)
"""Instructions that are executed after their event is committed."""
