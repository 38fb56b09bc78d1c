"""The controller's desk: every call becomes an event, every event is journalled before its answer leaves.

The desk owns the machines of all pipelines. It feeds them one event at a time on one loop, writes down those that
changed something, carries out what the machines ask for, and holds calls that have to wait. It knows nothing of HTTP.

Order of things for one event: the machine decides, the journal takes the event, waiting calls are woken, the commit is
awaited, and only then does the answer leave and are instructions carried out. So whatever a peer was told survives the
death of this process, and whatever did not survive was never told to anyone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from penstock.control import effects, events
from penstock.control.effects import Effect
from penstock.control.events import Event
from penstock.control.io.answers import noteworthy, reply
from penstock.errors import PenstockError, RunFailed
from penstock.journal.reader import replay
from penstock.records.ids import MemberId, PipelineName
from penstock.records.weights import Manifest
from penstock.runtime.clock import Clock
from penstock.wire import messages
from penstock.wire.messages import Refused, Reply, Request

logger = logging.getLogger(__name__)

MAX_WAIT_S = 30.0
"""However long a call asks to be held."""
JOURNAL_PATIENCE_S = 30.0
"""A disk that accepts nothing for so long has failed."""

_decode_event: Callable[[bytes], Event] = msgspec.msgpack.Decoder(Event).decode
_encode = msgspec.msgpack.Encoder().encode


class Machine(Protocol):
    """What the desk needs of a pipeline's control."""

    @property
    def revision(self) -> int: ...
    @property
    def phase(self) -> messages.Phase: ...
    @property
    def weights(self) -> Manifest | None: ...
    def handle(self, event: Event, now: float) -> list[Effect]: ...
    def snapshot(self) -> bytes: ...
    def restore(self, snapshot: bytes) -> None: ...
    def status(self, now: float) -> Mapping[str, Any]: ...
    def diagnose(self, now: float) -> str: ...
    def check(self) -> None: ...


class EventLog(Protocol):
    """What the desk needs of the journal's writer."""

    path: Path
    last_seq: int

    @property
    def uncommitted_for_s(self) -> float: ...
    def append(self, pipeline: PipelineName, at: float, event: bytes, decided: bytes = b"") -> int: ...
    async def committed(self, seq: int) -> None: ...
    def snapshot(self, states: Mapping[PipelineName, bytes]) -> None: ...
    def fail(self, failure: PenstockError) -> None: ...


Answerer = Callable[[Any], Awaitable[Reply]]


class ControlDesk:
    def __init__(
        self,
        pipelines: Mapping[PipelineName, Machine],
        journal: EventLog,
        clock: Clock,
        *,
        on_instruction: Callable[[PipelineName, Effect], None] | None = None,
        answerers: Mapping[type, Answerer] | None = None,
        snapshot_every: int = 20_000,
        tick_s: float = 0.5,
    ) -> None:
        """`on_instruction` is given every instruction the desk does not carry out itself, after the commit.

        `answerers` take over whole kinds of calls (replica reports, say) from the desk.
        """
        self.pipelines = dict(pipelines)
        self.journal = journal
        self.metrics: dict[tuple[PipelineName, MemberId], dict[str, float]] = {}
        """The latest figures of every process that reports any."""
        self.replicas: dict[tuple[PipelineName, MemberId], messages.ReportReplica] = {}
        self.failure: str = ""
        """The sentence with which the run failed, once it has."""
        self.held: dict[str, int] = {}
        """Calls being held now, by kind."""
        self.failed = asyncio.Event()
        self._clock = clock
        self._on_instruction = on_instruction
        self._snapshot_every = snapshot_every
        self._tick_s = tick_s
        self._snapshot_seq = 0
        self._latest = 0.0
        self._closing = False
        self._waiters: dict[tuple[PipelineName, str], list[asyncio.Future[None]]] = {}
        self._askers: dict[PipelineName, int] = dict.fromkeys(self.pipelines, 0)
        self._instructions: asyncio.Queue[tuple[int, PipelineName, Effect]] = asyncio.Queue()
        self._answerers: dict[type, Answerer] = {
            messages.Register: self._register,
            messages.Unregister: self._unregister,
            messages.Heartbeat: self._heartbeat,
            messages.AskLease: self._ask_lease,
            messages.Deliver: self._deliver,
            messages.AskBatch: self._ask_batch,
            messages.AckStep: self._ack_step,
            messages.AckCheckpoint: self._ack_checkpoint,
            messages.PublishWeights: self._publish_weights,
            messages.AskWeights: self._ask_weights,
            messages.ReportReplica: self._report_replica,
            messages.ReportMetrics: self._report_metrics,
            messages.Stop: self._stop,
            **(answerers or {}),
        }

    # -- life -----------------------------------------------------------------------------------------------------

    def recover(self) -> int:
        """Brings the machines to the last committed state; returns how many events lie behind it (0: a new run).

        Instructions of the past are not carried out again.
        """
        story = replay(self.journal.path)
        unknown = [name for name in story.states if name not in self.pipelines]
        for name, state in story.states.items():
            if name in self.pipelines:
                self.pipelines[name].restore(state)
        count = 0
        for entry in story.entries:
            self._latest = max(self._latest, entry.at)
            machine = self.pipelines.get(entry.pipeline)
            if machine is None:
                unknown.append(entry.pipeline)
                continue
            try:
                machine.handle(_decode_event(entry.body), entry.at)
            except (msgspec.DecodeError, PenstockError) as error:
                raise RunFailed(
                    f"journal {self.journal.path}: event {entry.seq} of pipeline {entry.pipeline} cannot be replayed: "
                    f"{error}"
                ) from error
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

    async def run(self) -> None:
        """Ticks and carries out instructions until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tick(), name="desk-tick")
            group.create_task(self._carry_out(), name="desk-instructions")

    def close(self) -> None:
        """Lets go of every held call; they are answered as they stand."""
        self._closing = True
        for name, topic in list(self._waiters):
            self._wake(name, topic)

    async def settle(self) -> None:
        """Returns once everything that happened so far is committed."""
        await self.journal.committed(self.journal.last_seq)

    def check(self) -> None:
        for machine in self.pipelines.values():
            machine.check()

    # -- events ---------------------------------------------------------------------------------------------------

    def happen(self, name: PipelineName, event: Event) -> list[Effect]:
        """Feeds one event to a machine, journals it if it changed anything, and wakes those who waited for it."""
        machine = self.pipelines[name]
        now = self._now()
        before = machine.revision
        decided = machine.handle(event, now)
        if machine.revision != before:
            self.journal.append(name, now, _encode(event), noteworthy(decided))
        for effect in decided:
            kind = type(effect)
            if kind is effects.Announce:
                self._wake(name, effect.topic)  # type: ignore[union-attr]
            elif kind in _INSTRUCTIONS:
                self._instructions.put_nowait((self.journal.last_seq, name, effect))
        return decided

    async def call(self, request: Request) -> Reply:
        """Answers one call. Never raises for what a caller can get wrong: it is `Refused`, and nothing changed."""
        if request.pipeline not in self.pipelines:
            known = ", ".join(self.pipelines)
            return Refused("LocalProtocolError", f"there is no pipeline {request.pipeline!r}; there are: {known}")
        answerer = self._answerers.get(type(request))
        if answerer is None:
            return Refused("LocalProtocolError", f"{type(request).__name__} is not answered by this controller")
        try:
            return await answerer(request)
        except RunFailed as error:
            self._fail(error.message)
            return Refused("RunFailed", error.message)

    def status(self) -> dict[str, Any]:
        """For the live view and `/v1/status`: plain values only."""
        now = self._now()
        return {
            "at": now,
            "failure": self.failure,
            "held": {kind: count for kind, count in self.held.items() if count},
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

    def _wake(self, name: PipelineName, topic: str) -> None:
        for waiter in self._waiters.pop((name, topic), ()):
            if not waiter.done():
                waiter.set_result(None)

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
            if self.journal.last_seq - self._snapshot_seq >= self._snapshot_every:
                self._snapshot_seq = self.journal.last_seq
                self.journal.snapshot({name: machine.snapshot() for name, machine in self.pipelines.items()})
            await asyncio.sleep(self._tick_s)

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
            if self._on_instruction is not None:
                self._on_instruction(name, effect)

    # -- waiting --------------------------------------------------------------------------------------------------

    async def _hold(self, name: PipelineName, topics: tuple[str, ...], until: float) -> bool:
        """Waits for one of the topics; False once the time is up or the desk closes."""
        loop = asyncio.get_running_loop()
        left_s = until - loop.time()
        if left_s <= 0 or self._closing:
            return False
        waiter: asyncio.Future[None] = loop.create_future()
        for topic in topics:
            self._waiters.setdefault((name, topic), []).append(waiter)
        timer = loop.call_later(left_s, _resolve, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            for topic in topics:
                waiting = self._waiters.get((name, topic))
                if waiting is not None and waiter in waiting:
                    waiting.remove(waiter)
        return not self._closing

    async def _decided(self, name: PipelineName, event: Event) -> Effect:
        """The answer to a call that does not wait, once it may be told."""
        answer = self.happen(name, event)[0]
        await self.journal.committed(self.journal.last_seq)
        return answer

    # -- calls ----------------------------------------------------------------------------------------------------

    async def _register(self, request: messages.Register) -> Reply:
        event = events.MemberRegistered(
            member=request.member,
            role=request.role,
            pid=request.pid,
            host_id=request.host_id,
            ring=request.ring,
            prompt_count=request.prompt_count,
            step=request.step,
            lineage=request.lineage,
        )
        return reply(await self._decided(request.pipeline, event))

    async def _unregister(self, request: messages.Unregister) -> Reply:
        self.metrics.pop((request.pipeline, request.member), None)
        self.replicas.pop((request.pipeline, request.member), None)
        left = events.MemberLeft(request.member, request.reason, request.died)
        return reply(await self._decided(request.pipeline, left))

    async def _heartbeat(self, request: messages.Heartbeat) -> Reply:
        event = events.HeartbeatHeard(request.member, request.progressed_ago_s, request.doing)
        return reply(self.happen(request.pipeline, event)[0])  # promises nothing, so it waits for no commit

    async def _ask_lease(self, request: messages.AskLease) -> Reply:
        name = request.pipeline
        until = _until(request.wait_s)
        held = False
        try:
            while True:
                others = self._askers[name] - held
                event = events.LeaseAsked(request.member, request.request, request.samples, request.version, others)
                answer = self.happen(name, event)[0]
                waits = isinstance(answer, effects.RefuseLease) and answer.verdict == "throttled"
                if not waits:
                    break
                if not held:
                    held = True
                    self._askers[name] += 1
                    self._count_held("ask_lease", 1)
                if not await self._hold(name, ("leases", "phase"), until):
                    break
        finally:
            if held:
                self._askers[name] -= 1
                self._count_held("ask_lease", -1)
        await self.journal.committed(self.journal.last_seq)
        return reply(answer)

    async def _ask_batch(self, request: messages.AskBatch) -> Reply:
        name = request.pipeline
        until = _until(request.wait_s)
        self._count_held("ask_batch", 1)
        try:
            while True:
                answer = self.happen(name, events.BatchAsked(request.member, request.step))[0]
                if not isinstance(answer, effects.DeferBatch):
                    break
                if not await self._hold(name, ("batches", "phase"), until):
                    break
        finally:
            self._count_held("ask_batch", -1)
        await self.journal.committed(self.journal.last_seq)
        return reply(answer)

    async def _ask_weights(self, request: messages.AskWeights) -> Reply:
        name = request.pipeline
        machine = self.pipelines[name]
        until = _until(request.wait_s)
        self._count_held("ask_weights", 1)
        try:
            while True:
                newest = machine.weights
                if newest is not None and newest.digest != request.held_digest:
                    await self.journal.committed(self.journal.last_seq)
                    return messages.Weights(newest)
                if machine.phase == "stopped" or not await self._hold(name, ("weights", "phase"), until):
                    waiting_for = "newer weights" if newest is not None else "the first weights of the trainer"
                    return messages.NotYet(waiting_for, machine.phase)
        finally:
            self._count_held("ask_weights", -1)

    async def _deliver(self, request: messages.Deliver) -> Reply:
        event = events.Delivered(request.member, request.rollouts, request.failures, request.returned)
        return reply(await self._decided(request.pipeline, event))

    async def _ack_step(self, request: messages.AckStep) -> Reply:
        event = events.StepAcked(
            member=request.member,
            step=request.step,
            missing_prompts=request.missing_prompts,
            missing_reason=request.missing_reason,
            metrics=request.metrics,
        )
        return reply(await self._decided(request.pipeline, event))

    async def _ack_checkpoint(self, request: messages.AckCheckpoint) -> Reply:
        return reply(await self._decided(request.pipeline, events.CheckpointSaved(request.member, request.step)))

    async def _publish_weights(self, request: messages.PublishWeights) -> Reply:
        return reply(await self._decided(request.pipeline, events.WeightsPublished(request.member, request.manifest)))

    async def _report_replica(self, request: messages.ReportReplica) -> Reply:
        self.replicas[request.pipeline, request.member] = request
        return messages.Ok()

    async def _report_metrics(self, request: messages.ReportMetrics) -> Reply:
        self.metrics[request.pipeline, request.member] = request.values
        return messages.Ok()

    async def _stop(self, request: messages.Stop) -> Reply:
        """Ends the whole run: every pipeline hears of it."""
        for name in self.pipelines:
            self.happen(name, events.StopAsked(request.reason, request.failed))
        await self.settle()
        return messages.Ok()

    def _count_held(self, kind: str, change: int) -> None:
        self.held[kind] = self.held.get(kind, 0) + change

    def __repr__(self) -> str:
        return (
            f"ControlDesk({list(self.pipelines.values())}, held={self.held}, {self.journal}, failure={self.failure!r})"
        )


_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_INSTRUCTIONS = frozenset(
    {effects.OfferWeights, effects.EvictMember, effects.ReleasePayloads, effects.Log, effects.FailRun}
)


def _until(wait_s: float) -> float:
    return asyncio.get_running_loop().time() + min(max(0.0, wait_s), MAX_WAIT_S)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
